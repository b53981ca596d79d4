"""Kernels that come onto the card early wait before they touch anything; elsewhere their launch is an ordinary one."""

import ast
from pathlib import Path

import pytest
import torch

import phalanx.workers.kernels

pytest.importorskip("triton")

KERNELS = Path(phalanx.workers.kernels.__path__[0])
READ_EARLY = {("load", "weight_row_ptr"), ("load", "kv_lens_ptr"), ("load", "table_ptr")}
"""Weights, which no kernel writes; lengths and tables, which the first kernel of a step has written."""


def dependent_kernels() -> list[tuple[str, ast.FunctionDef]]:
    found = []
    for path in sorted(KERNELS.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.endswith("kernel"):
                if "IS_DEPENDENT" in [argument.arg for argument in node.args.args]:
                    found.append((path.name, node))
    return found


def launches(text: str) -> int:
    return sum(
        isinstance(node, ast.Call) and ast.unparse(node.func) == "dependent_launch"
        for node in ast.walk(ast.parse(text))
    )


def memory_accesses(statement: ast.stmt) -> list[tuple[str, str]]:
    """What is done to memory, and by which pointer."""
    found = []
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            operation = node.func.attr
            if operation in ("load", "store") or operation.startswith("atomic"):
                names = [name.id for name in ast.walk(node.args[0]) if isinstance(name, ast.Name)]
                found += [(operation, name) for name in names if name.endswith("_ptr")]
    return found


def test_those_kernels_wait_before_they_touch_what_others_write() -> None:
    kernels = dependent_kernels()
    assert len(kernels) > 10
    for file, kernel in kernels:
        lines = [ast.unparse(statement) for statement in kernel.body]
        assert "wait_for_previous(IS_DEPENDENT)" in lines, f"{file}: {kernel.name}"
        before = kernel.body[: lines.index("wait_for_previous(IS_DEPENDENT)")]
        for operation, pointer in [access for statement in before for access in memory_accesses(statement)]:
            assert (operation, pointer) in READ_EARLY, f"{file}: {kernel.name}: {operation} {pointer}"


def test_the_next_kernel_comes_only_after_the_wait() -> None:
    for file, kernel in dependent_kernels():
        lines = [ast.unparse(statement) for statement in kernel.body]
        if "let_next_come(IS_DEPENDENT)" in lines:
            waits_at = lines.index("wait_for_previous(IS_DEPENDENT)")
            assert waits_at < lines.index("let_next_come(IS_DEPENDENT)"), f"{file}: {kernel.name}"


def test_only_kernels_that_wait_are_launched_so() -> None:
    for path in sorted(KERNELS.glob("*.py")):
        own = [kernel for file, kernel in dependent_kernels() if file == path.name]
        assert launches(path.read_text()) == len(own), path.name


def test_elsewhere_the_launch_is_an_ordinary_one() -> None:
    from phalanx.workers.kernels.dependent_launch import dependent_launch

    assert dependent_launch(torch.device("cpu")) == {"IS_DEPENDENT": False}
