"""`python -m phalanx.launch.demo`: a whole cluster on this machine, asked two questions, and stopped.

Called by: people who want to see it work. Starts `cluster-launch` on the embedded model as two replicas of two
ranks each, on CPU or GPU, and speaks to it through OpenAI's own client. When the cluster ends early, so does
this, with its exit code; when this is interrupted, the cluster is stopped first.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import IO

from ..shm.exit_codes import ExitCode

QUESTIONS = ("What is the capital of France?", "Name three fruits.")
MAX_TOKENS = 48
STOP_TIMEOUT_S = 60.0
READY_LINE = re.compile(r"^ready after [\d.]+ s: (?P<model>.+) at (?P<url>http://\S+)$")
"""What console.py prints when everything serves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the cluster listens, and what it calls its model."""

    url: str
    model: str


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; further arguments go to cluster-launch. Returns 0 when the cluster stopped in order."""
    if find_spec("openai") is None:
        print("the demo needs OpenAI's client: pip install openai", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    options = list(sys.argv[1:] if argv is None else argv)
    command = [sys.executable, "-m", "phalanx.launch", "--tp", "2", "--dp", "2", "--port", "0", *options]
    print("$", " ".join(["cluster-launch", *command[3:]]), flush=True)
    # A session of its own: Ctrl-C reaches the cluster from here, once, and not from the terminal as well.
    cluster = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert cluster.stdout is not None
        endpoint = wait_ready(cluster.stdout)
        if endpoint is None:
            return cluster.wait()
        for question in QUESTIONS:
            ask(endpoint, question)
        print("\nstopping", flush=True)
        cluster.send_signal(signal.SIGINT)
        code = cluster.wait(STOP_TIMEOUT_S)
        print(f"cluster-launch ended with exit code {code}")
        return code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    finally:
        stop(cluster)


def wait_ready(output: IO[str]) -> Endpoint | None:
    """Show the cluster's output until it says that it serves. None: it ended instead."""
    for line in output:
        print(line, end="", flush=True)
        if match := READY_LINE.match(line):
            return Endpoint(url=match["url"], model=match["model"])
    return None


def ask(endpoint: Endpoint, question: str) -> None:
    """Ask one question, and show the answer as it is written."""
    # Imported here: OpenAI's client is no part of the server's own needs.
    from openai import OpenAI

    print(f"\n> {question}", flush=True)
    with OpenAI(base_url=f"{endpoint.url}/v1", api_key="none") as client:
        stream = client.chat.completions.create(
            model=endpoint.model,
            messages=[{"role": "user", "content": question}],
            temperature=0,
            max_tokens=MAX_TOKENS,
            stream=True,
        )
        for chunk in stream:
            for choice in chunk.choices:
                print(choice.delta.content or "", end="", flush=True)
    print()


def stop(cluster: "subprocess.Popen[str]") -> None:
    """End the cluster if it still runs: ask, wait, then kill. Its processes end with it."""
    if cluster.poll() is None:
        cluster.terminate()
        try:
            cluster.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            cluster.kill()
            cluster.wait()
    if cluster.stdout is not None:
        cluster.stdout.close()


if __name__ == "__main__":
    sys.exit(main())
