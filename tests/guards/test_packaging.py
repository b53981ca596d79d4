"""The public names, the links under src/ and the wheel."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import phalanx

ROOT = Path(__file__).parents[2]
FOLDERS = ("shm", "workers", "engine", "cluster", "launch")


def test_public_names_are_exactly_these() -> None:
    assert phalanx.__all__ == ["LLM", "AsyncLLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
    for name in phalanx.__all__:
        assert getattr(phalanx, name).__name__ == name


def test_every_link_resolves_into_the_checkout() -> None:
    links = {path.name: path.resolve() for path in (ROOT / "src" / "phalanx").iterdir()}
    links.pop("__pycache__", None)

    assert links == {name: ROOT / name for name in (*FOLDERS, "__init__.py", "py.typed")}


def test_the_wheel_holds_every_module(tmp_path: Path) -> None:
    # setuptools keeps what it copied last time, modules that are gone since included.
    shutil.rmtree(ROOT / "build", ignore_errors=True)
    # Without isolation: the build backend is a development dependency, and nothing is fetched.
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(command, check=True, capture_output=True)

    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    ours = {
        f"phalanx/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    }
    assert packed == ours | {"phalanx/__init__.py"}
    assert "phalanx/py.typed" in zipfile.ZipFile(wheel).namelist()
