"""The rules of the house that a reader relies on: each is one walk over the syntax trees."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("shm", "workers", "engine", "cluster", "launch")
"""From the lowest to the highest: a folder imports from itself and from those before it."""
MAX_LINES = 400

MODULES = sorted(path for folder in FLOORS for path in (ROOT / folder).rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imports(path: Path) -> Iterator[tuple[int, str, int]]:
    """Yield (level, module, line) of every import of a file, those inside functions and TYPE_CHECKING included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield 0, alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield node.level, node.module or "", node.lineno


def calls(path: Path) -> Iterator[ast.Call]:
    return (
        node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)
    )


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    parts = path.relative_to(ROOT).parts
    floor = FLOORS.index(parts[0])
    for level, module, line in imports(path):
        if level == 0:
            continue
        package = list(parts[:-1])
        target = package[: len(package) - (level - 1)] + (module.split(".") if module else [])
        if target and target[0] in FLOORS:
            assert FLOORS.index(target[0]) <= floor, f"{name_of(path)}:{line} imports upward: {target}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_our_own_modules_are_imported_relatively(path: Path) -> None:
    for level, module, line in imports(path):
        assert level > 0 or module.split(".")[0] not in (*FLOORS, "phalanx"), f"{name_of(path)}:{line}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_workers_import_torch(path: Path) -> None:
    if path.relative_to(ROOT).parts[0] == "workers":
        return
    for _, module, line in imports(path):
        assert module.split(".")[0] not in ("torch", "triton"), f"{name_of(path)}:{line}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_pickle_and_no_multiprocessing(path: Path) -> None:
    for _, module, line in imports(path):
        forbidden = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "multiprocessing"}
        assert module.split(".")[0] not in forbidden, f"{name_of(path)}:{line}"
    for call in calls(path):
        name = ast.unparse(call.func).split(".")[-1]
        assert name not in ("recv_pyobj", "send_pyobj"), f"{name_of(path)}:{call.lineno}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_environment_variable_of_our_own(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert set(re.findall(r"PHALANX_[A-Z_]+", text)) <= {"PHALANX_API_KEY"}, name_of(path)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_fits_the_house(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= MAX_LINES, f"{name_of(path)}: split it by responsibility"
    if path.name == "__init__.py":
        assert text == "", f"{name_of(path)}: an __init__.py of a subpackage is empty"
    else:
        assert ast.get_docstring(ast.parse(text)), f"{name_of(path)} says nothing of itself"


@pytest.mark.parametrize(
    "module",
    [
        "phalanx",
        "phalanx.shm.child_context",
        "phalanx.workers.multiproc_executor",
        "phalanx.engine.core_proc",
        "phalanx.engine.async_llm",
        "phalanx.engine.llm",
        "phalanx.engine.tokenizer",
        "phalanx.engine.chat_template",
        "phalanx.cluster.supervisor",
        "phalanx.cluster.coordinator",
        "phalanx.cluster.dp_client",
        "phalanx.launch.cli",
        "phalanx.launch.bench.cli",
        "phalanx.launch.server.process",
    ],
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    script = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT / "src").returncode == 0
