"""cluster-launch: the command that starts a cluster and ends with it.

Called by: the console script and `python -m phalanx.launch`, in the process that becomes the supervisor.
Everything that can be known to be wrong is said before anything starts, in one sentence on standard error.
Exit codes: 0 done, 1 failed while starting or running, 2 bad configuration, 130 interrupted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from .. import __version__
from ..shm.errors import ConfigError, ServingError
from ..shm.exit_codes import ExitCode
from ..shm.logs import configure_logging
from ..workers.gpu_count import count_gpus
from .config import Override, ResolvedConfig, load_config, parse_assignment, show_config
from .listener import bind_listener
from .preflight import check_model, read_admin_key, read_api_key, resolve_device

PROGRAM = "cluster-launch"

# Where each flag's value goes in the tree.
FIELDS = {
    "model": ("MODEL", "model.path"),
    "tensor_parallel_size": ("--tp", "parallel.tensor_parallel_size"),
    "data_parallel_size": ("--dp", "cluster.data_parallel_size"),
    "routing_policy": ("--routing-policy", "cluster.routing_policy"),
    "num_api_servers": ("--api-servers", "cluster.num_api_servers"),
    "device": ("--device", "parallel.device"),
    "dtype": ("--dtype", "model.dtype"),
    "max_model_len": ("--max-model-len", "model.max_model_len"),
    "gpu_memory_utilization": ("--gpu-memory-utilization", "cache.memory_utilization"),
    "host": ("--host", "server.host"),
    "port": ("--port", "server.port"),
    "served_model_name": ("--served-model-name", "server.served_model_name"),
    "api_key_file": ("--api-key-file", "server.api_key_file"),
    "admin_key_file": ("--admin-key-file", "server.admin_key_file"),
    "drain_timeout_s": ("--drain-timeout", "cluster.drain_timeout_s"),
}


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        """Write one sentence and leave as for any other bad setting."""
        self.exit(ExitCode.BAD_CONFIG, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; the result is the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["config"]:
            return config_command(build_config_parser().parse_args(arguments[1:]))
        return launch_command(build_parser().parse_args(arguments))
    except ConfigError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return ExitCode.BAD_CONFIG
    except ServingError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return ExitCode.FAILED
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def build_parser() -> argparse.ArgumentParser:
    """Make the parser of `cluster-launch [MODEL]`."""
    parser = Parser(
        prog=PROGRAM,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage=f"{PROGRAM} [MODEL] [options]\n       {PROGRAM} config show|check FILE",
        description="Serve a large language model on many devices, with the OpenAI API.",
        epilog="All other settings: --config and --set; `cluster-launch config show FILE` lists them.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder or hub name; none: a small model")
    group = parser.add_argument_group("parallelism")
    group.add_argument("--tp", "--tensor-parallel-size", dest="tensor_parallel_size", type=int, metavar="N",
                       help="devices that share one replica (1)")  # fmt: skip
    group.add_argument("--dp", "--data-parallel-size", dest="data_parallel_size", type=int, metavar="N",
                       help="replicas that share the requests (1)")  # fmt: skip
    group.add_argument("--routing-policy", metavar="NAME", help="prefix_aware, kv_aware, least_loaded, power_of_two or "
                       "round_robin (prefix_aware)")  # fmt: skip
    group.add_argument("--device", metavar="NAME", help="auto, cpu or cuda (auto)")
    group = parser.add_argument_group("model")
    group.add_argument("--dtype", metavar="NAME", help="auto, float32, bfloat16 or float16 (auto)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="longest prompt plus output, in tokens")
    group.add_argument("--gpu-memory-utilization", type=float, metavar="PART",
                       help="part of a GPU's memory that one rank may use in all (0.9)")  # fmt: skip
    group = parser.add_argument_group("server")
    group.add_argument("--api-servers", dest="num_api_servers", type=int, metavar="N",
                       help="processes that share tokenising and streaming (1)")  # fmt: skip
    group.add_argument("--host", metavar="ADDRESS", help="address to listen on (127.0.0.1)")
    group.add_argument("--port", type=int, metavar="N", help="port to listen on; 0: any free one (8000)")
    group.add_argument("--served-model-name", metavar="NAME", help="what clients call the model")
    group.add_argument("--api-key-file", metavar="FILE", help="file with the key that clients must send")
    group.add_argument(
        "--admin-key-file", metavar="FILE", help="file with the key of administrators (no /admin)"
    )
    group.add_argument("--drain-timeout", dest="drain_timeout_s", type=float, metavar="S",
                       help="seconds that running requests get to finish at a stop (30)")  # fmt: skip
    group = parser.add_argument_group("settings")
    group.add_argument("--config", type=Path, metavar="FILE", help="YAML file of settings")
    group.add_argument("--set", dest="assignments", action="append", default=[], metavar="SECTION.FIELD=VALUE",
                       help="one setting; may be repeated")  # fmt: skip
    group.add_argument(
        "--dry-run", action="store_true", help="check everything, show the plan, start nothing"
    )
    group.add_argument("--version", action="version", version=f"phalanx {__version__}")
    return parser


def build_config_parser() -> argparse.ArgumentParser:
    """Make the parser of `cluster-launch config`."""
    parser = Parser(prog=f"{PROGRAM} config", description="Show or check a YAML file of settings.")
    parser.add_argument("action", choices=("show", "check"))
    parser.add_argument("file", type=Path, metavar="FILE")
    return parser


def config_command(arguments: argparse.Namespace) -> int:
    """Show a file's resolved tree, or only check it."""
    resolved = load_config(arguments.file, num_gpus=count_gpus())
    sys.stdout.write(show_config(resolved) if arguments.action == "show" else f"{arguments.file}: ok\n")
    return ExitCode.OK


def launch_command(arguments: argparse.Namespace) -> int:
    """Check everything, then run the cluster until it ends."""
    configure_logging("supervisor")
    config = resolve_arguments(arguments).config
    read_api_key(config.server)
    read_admin_key(config.server)
    config = resolve_device(config, count_gpus())
    # Imported here: everything that runs a cluster; a mistyped setting is said long before.
    from .runtime import plan_of, plan_shared_memory, run

    plan = plan_of(config)
    if config.server.port:
        # A port in use is said before a model is fetched; the one that stays open is bound by the runtime.
        bind_listener(config.server).close()
    # Imported here: the code that fetches and converts is not needed to say that a setting is wrong.
    from .model_source import resolve_model

    config = resolve_model(config)
    check_model(config)
    if arguments.dry_run:
        # Imported here: rich costs time, and only what has passed every check is shown.
        from .tables import memory_table, plan_table, print_tables

        print_tables([plan_table(plan), memory_table(plan_shared_memory(config, plan))], sys.stdout)
        return ExitCode.OK
    return run(config, plan)


def resolve_arguments(arguments: argparse.Namespace) -> ResolvedConfig:
    """Join file, flags and `--set`. A flag and `--set` of one field: the flag, which is the plainer word, wins."""
    assignments = [parse_assignment(text) for text in arguments.assignments]
    flags = [
        Override(name=field, value=value, origin=flag)
        for name, (flag, field) in FIELDS.items()
        if (value := getattr(arguments, name)) is not None
    ]
    if arguments.model == "":
        raise ConfigError("model", "must not be empty")
    return load_config(arguments.config, [*assignments, *flags], num_gpus=count_gpus())
