"""From the name of a model to the folder or file that holds it: here, or fetched from the hub.

Called by: engine_options.py for `LLM` and `AsyncLLM`, launch/model_source.py in the supervisor; in the user's process,
before anything starts. May block on a download.
"""

import re
from pathlib import Path

from ..shm.errors import ConfigError

HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
WANTED_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model")


def find_model_folder(name: str) -> Path:
    """Turn a folder, a GGUF file or a hub name into a whole path. Raises ConfigError (field "model")."""
    local = local_folder(name)
    return download_from_hub(name) if local is None else local


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
    """Fetch a model by its hub name, or find it in the hub's local cache. Raises ConfigError (field "model")."""
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


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
