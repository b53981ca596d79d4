"""Messages of a chat to the one text that the model was trained on.

Called by: InputProcessor. A template is code from whoever made the checkpoint: it runs in jinja's immutable
sandbox and sees plain JSON values only. Filters and globals are those that templates on the hub expect.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
import jinja2.utils

from .errors import InvalidRequestError

DEFAULT = "default"
TOOL_USE = "tool_use"
"""Name of the template that is preferred when tools are given."""


class ChatTemplate:
    """The chat templates of one model, compiled at first use.

    templates:      by name, as `Tokenizer.chat_templates`
    special_tokens: variables of the template ("bos_token": "<s>")
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._environment = _make_environment()
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Render a chat. Encode the result without special tokens: the template has written them.

        variables: handed to the template as they are ("enable_thinking")
        Raises InvalidRequestError: no messages, no template, or the template refuses them.
        """
        if not messages:
            raise InvalidRequestError("messages must not be empty", field="messages")
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        if name not in self._templates:
            raise InvalidRequestError(
                "this model has no chat template: send a plain prompt instead", field="messages"
            )
        # Many templates write "None" or fail where a key is null, and do the right thing where it is missing.
        plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
        try:
            if name not in self._compiled:
                self._compiled[name] = self._environment.from_string(self._templates[name])
            return self._compiled[name].render(
                {
                    **self._special_tokens,
                    **variables,
                    "messages": plain,
                    "tools": tools,
                    "documents": variables.get("documents"),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            OverflowError,
        ) as error:
            raise InvalidRequestError(
                f"the chat template refuses these messages: {error}", field="messages"
            ) from None
        except (RecursionError, ZeroDivisionError) as error:
            raise InvalidRequestError(
                f"the chat template fails on these messages: {error}", field="messages"
            ) from None


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here its body is text like any other."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _TemplateNamespace(jinja2.utils.Namespace):
    """jinja's namespace without names that begin with an underscore: those lead out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # As jinja does, so that `namespace(self=...)` works.
        self, rest = args[0], args[1:]
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _TemplateNamespace
    return environment


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja's own filter escapes for HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
