"""Values of command-line flags that several benchmarks share.

Called by: argparse, which turns ValueError into one sentence that names the flag.
"""


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def positive_list(text: str) -> tuple[int, ...]:
    """Read whole numbers of at least 1, with commas between."""
    return tuple(positive(part) for part in text.split(","))
