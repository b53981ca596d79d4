"""From what the user calls a model to the folder that holds it, and the name that clients see.

Called by: cli.py in the supervisor, before anything starts. A name is a local folder or GGUF file, else a name on
the hub; none at all is the embedded model. May block on a download; shows its progress on standard error.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import IO

from ..engine.model_folder import download_from_hub, local_folder
from ..workers.gguf_file import is_gguf
from .config import EMBEDDED_MODEL, LaunchConfig
from .embedded_model import MODEL_NAME, ensure_default_model


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
