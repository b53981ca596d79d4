"""From what the user calls a model to the folder that holds it, and the name that clients see.

Called by: cli.py in the supervisor, before anything starts. A name is a local folder or GGUF file, else a name on
the hub; none at all is the embedded model. May block on a download; shows its progress on standard error.
"""

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

from ..shm.errors import ConfigError
from ..workers.gguf_file import is_gguf
from .config import EMBEDDED_MODEL, LaunchConfig
from .embedded_model import MODEL_NAME, ensure_default_model

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")


def resolve_model(config: LaunchConfig) -> LaunchConfig:
    """Return the tree with `model.path` a local folder or file and `server.served_model_name` set.

    Raises ConfigError (field "model") when there is no such model.
    """
    name = config.model.path
    if name == EMBEDDED_MODEL:
        with show_progress(sys.stderr) as progress:
            folder = ensure_default_model(progress)
        served_name = MODEL_NAME
    elif (local := local_folder(name)) is not None:
        folder = local
        served_name = folder.stem if is_gguf(folder) else folder.name
    else:
        folder = download_from_hub(name)
        served_name = name
    return replace(
        config,
        model=replace(config.model, path=str(folder)),
        server=replace(config.server, served_model_name=config.server.served_model_name or served_name),
    )


def local_folder(name: str) -> Path | None:
    """Give the whole path of what `name` means on this machine; None when there is nothing."""
    try:
        path = Path(name).expanduser()
        # Resolved now: child processes may run elsewhere, and "." has no name to serve under.
        return path.resolve() if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        # No such user ("~nobody"), longer than a name may be, or not a path at all.
        return None


def download_from_hub(name: str) -> Path:
    """Fetch a model by its hub name, or find it in the hub's local cache."""
    if not HUB_NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError("model", f"{name!r} is neither a folder nor a name on the hub")
    # Imported here: a model that is a local folder, the usual case, does not need it.
    from huggingface_hub import errors, snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(WANTED_FILES)))
    except errors.GatedRepoError:
        raise ConfigError(
            "model", f"{name!r} asks for a permission on the hub that this user lacks"
        ) from None
    except errors.RepositoryNotFoundError:
        raise ConfigError("model", f"{name!r} is neither a folder here nor a model on the hub") from None
    except errors.LocalEntryNotFoundError:
        problem = f"{name!r} is not a folder here, and the hub cannot be reached to look for it"
        raise ConfigError("model", problem) from None
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, ValueError) as error:
        raise ConfigError("model", f"{name!r} cannot be fetched from the hub: {_first_line(error)}") from None


@contextmanager
def show_progress(file: IO[str]) -> Iterator[Callable[[str, float], None]]:
    """Give a function that shows what goes on: a bar on a terminal, else a plain line for each new activity."""
    if not file.isatty():
        seen: set[str] = set()

        def tell(what: str, part: float) -> None:
            if what not in seen:
                seen.add(what)
                print(what, file=file, flush=True)

        yield tell
        return
    # Imported here: rich's bar is only of use on a terminal, and only while something is fetched.
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(file=file), transient=True) as bar:
        task = bar.add_task("", total=1.0)
        yield lambda what, part: bar.update(task, description=what, completed=part)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
