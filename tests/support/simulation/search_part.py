"""`python -m support.simulation.search_part FIRST END`: a part of a long search in a process of its own.

Prints one line of JSON: the failure, if there is one, and how requests ended.
"""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack

from .cluster import search


def search_on_all_cores(seeds: range) -> tuple[str | None, Counter[str]]:
    """Search a part of the seeds on each core; return what went wrong first, and how all requests ended."""
    num_parts = len(os.sched_getaffinity(0))
    bounds = [seeds.start + len(seeds) * part // num_parts for part in range(num_parts + 1)]
    failures: list[str] = []
    endings: Counter[str] = Counter()
    with ExitStack() as stack:
        parts = []
        for first, end in itertools.pairwise(bounds):
            command = [sys.executable, "-m", __name__, str(first), str(end)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            part = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
            parts.append(stack.enter_context(part))
            stack.callback(part.kill)
        for part in parts:
            said = part.communicate()[0]
            assert part.returncode == 0, "a part of the search has ended early"
            found = json.loads(said)
            endings.update(found["endings"])
            if found["failure"] is not None:
                failures.append(found["failure"])
    return next(iter(failures), None), endings


def main(first: str, end: str) -> None:
    """Search, and print what was found."""
    failure, endings = search(range(int(first), int(end)))
    print(json.dumps({"failure": None if failure is None else str(failure), "endings": endings}))


if __name__ == "__main__":
    main(*sys.argv[1:])
