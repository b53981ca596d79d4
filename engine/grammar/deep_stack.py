"""Threads with a deep stack, for a library that reads grammars by recursion.

Called by: llguidance_backend.py to check, CompilerPool to compile. A client can write a chain of definitions, each of
which names the next one, as long as `MAX_GRAMMAR_CHARACTERS` allows; on the usual stack of 8 MiB a chain of some
thousands ends the process. The worst specification of the greatest length was found to need an eighth of this. The
memory is only mapped: what no grammar reaches costs nothing.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

STACK_BYTES = 512 << 20

# The size of the next thread's stack is a setting of the process.
_lock = threading.Lock()


def start_on_deep_stack(target: Callable[[], None], name: str) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _lock:
        usual = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return thread


def call_on_deep_stack(function: Callable[[], T]) -> T:
    """Call a function in a thread of its own, and wait for it. Raises what it raises."""
    results: list[T] = []
    errors: list[BaseException] = []

    def call() -> None:
        # Carried over to the caller, which raises it.
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    start_on_deep_stack(call, "grammar check").join()
    if errors:
        raise errors[0]
    return results[0]
