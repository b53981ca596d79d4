"""The registry of hooks: which names it takes, and in which types arguments and results travel."""

import sys
from types import ModuleType

import msgspec
import pytest

from phalanx.shm.errors import ConfigError
from phalanx.workers.calls import HookDone, WorkerFailure
from phalanx.workers.config import ExecutorConfig
from phalanx.workers.hooks import HookRegistry, check_hook_name, encode_argument, hook_outcome


class Rank:
    tp_rank = 3


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An importable module "user_hooks" to put hooks into."""
    module = ModuleType("user_hooks")
    monkeypatch.setitem(sys.modules, "user_hooks", module)
    return module


@pytest.mark.parametrize("entry", ["no_colon", ":function", "module:", "module:a.b", "module:two words"])
def test_an_entry_that_names_no_function_is_refused_by_the_configuration(entry: str) -> None:
    with pytest.raises(ConfigError, match=r"executor\.hooks: must be of the form module:function"):
        ExecutorConfig(hooks=(entry,))


def test_two_hooks_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="two hooks of the name f"):
        ExecutorConfig(hooks=("a:f", "b:f"))


def test_a_hook_must_not_take_the_name_of_a_built_in_one(module: ModuleType) -> None:
    module.memory_report = lambda worker, argument: None  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match="already"):
        HookRegistry(("user_hooks:memory_report",))


def test_a_hook_must_be_a_function_of_two(module: ModuleType) -> None:
    module.number = 3  # type: ignore[attr-defined]
    module.lonely = lambda worker: None  # type: ignore[attr-defined]

    with pytest.raises(ConfigError, match="not a function"):
        HookRegistry(("user_hooks:number",))
    with pytest.raises(ConfigError, match="two arguments"):
        HookRegistry(("user_hooks:lonely",))
    with pytest.raises(ConfigError, match="cannot be imported"):
        HookRegistry(("user_hooks:absent",))


def test_an_argument_has_the_type_of_its_annotation_also_as_text(module: ModuleType) -> None:
    def first(worker: "NotImportedHere", argument: tuple[int, ...]) -> str:  # type: ignore[name-defined]  # noqa: F821
        return type(argument).__name__

    def second(worker: object, argument: "set[int]") -> str:
        return type(argument).__name__

    def third(worker, argument):  # type: ignore[no-untyped-def]
        return type(argument).__name__

    module.first, module.second, module.third = first, second, third  # type: ignore[attr-defined]
    registry = HookRegistry(("user_hooks:first", "user_hooks:second", "user_hooks:third"))

    kinds = [
        msgspec.msgpack.decode(registry.run(Rank(), name, encode_argument([1])))
        for name in ("first", "second", "third")
    ]
    assert kinds == ["tuple", "set", "list"]


def test_an_annotation_that_does_not_resolve_is_an_error_of_the_configuration(module: ModuleType) -> None:
    def hook(worker: object, argument: "Nonesuch") -> None:  # type: ignore[name-defined]  # noqa: F821
        return None

    module.hook = hook  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="does not resolve"):
        HookRegistry(("user_hooks:hook",))


def test_only_registered_names_pass_the_check() -> None:
    check_hook_name("memory_report", ())
    check_hook_name("f", ("a.b:f",))
    with pytest.raises(ValueError, match="known are memory_report, sleep, wake, f"):
        check_hook_name("a.b:f", ("a.b:f",))


def test_an_outcome_is_a_result_an_error_or_silence() -> None:
    failure = WorkerFailure(tp_rank=1, call_id=1, phase="hook", error="no", traceback="there", failed_at=0.0)

    assert hook_outcome(0, HookDone(encode_argument([1])), 1.0, tuple[int, ...]).result == (1,)
    assert hook_outcome(0, HookDone(encode_argument([1])), 1.0, None).result == [1]
    assert "the result is no" in (hook_outcome(0, HookDone(encode_argument("x")), 1.0, int).error or "")
    failed = hook_outcome(1, failure, 1.0, int)
    assert (failed.result, failed.error, failed.traceback) == (None, "no", "there")
    assert hook_outcome(1, None, 2.5, int).error == "no answer within 2.5 s"
