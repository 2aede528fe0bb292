"""Chat templates: the jinja text that turns messages into the prompt a model was trained on, run in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lockstep.errors import LockstepError


def render(template: str, messages: Sequence[dict[str, Any]], /, **names: Any) -> str:
    """The prompt of a conversation, by the conventions of `transformers` (same environment, filters and names).

    messages: dicts with `role` and `content`. names: add_generation_prompt, bos_token, eos_token, tools, ...
    Raises LockstepError where the template does not compile or refuses the messages.
    """
    try:
        return _compiled(template)({**names, "messages": list(messages)})
    except Exception as error:  # a template is a program of the model's: it can fail in any way
        raise LockstepError(f"the model's chat template refuses these messages: {error}") from error


@lru_cache(maxsize=8)
def _compiled(template: str) -> Callable[..., str]:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form))
    return environment.from_string(template).render


def _tojson(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)  # jinja's own escapes HTML


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


class _Generation(Extension):
    """`{% generation %}`: marks what the assistant said, for training masks; the text itself passes through."""

    tags = {"generation"}  # noqa: RUF012 (jinja's interface)

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
