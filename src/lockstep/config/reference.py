"""The configuration reference, written from the schema: `docs/configuration.md`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from lockstep.config.check import expected
from lockstep.config.names import sections
from lockstep.config.schema import Config
from lockstep.config.section import Section

_HEAD = """# Configuration

<!-- Written by `lockstep config reference > docs/configuration.md`; change the schema, not this file. -->

A run is described by one YAML file: `lockstep train run.yaml`. `--set KEY=VALUE` puts a value over the file's,
as in `--set train.steps=100 --set optimizer.lr=1e-3`. An unknown key, a value of a wrong type and a key that
stands twice are errors. The resolved configuration, with every default, is saved with each run;
`lockstep config run.yaml` prints it.

Plain values are those of YAML 1.2: `true` and `false` (not `yes` or `on`), whole numbers, numbers such as
`1e-3`, `null`; everything else is text.
"""


def reference() -> str:
    """The Markdown text: a table of keys for each section."""
    return "\n".join([_HEAD, *_section(Config, "")])


def _section(section: type[Section], prefix: str) -> Iterator[str]:
    title = f"`{prefix.rstrip('.')}`" if prefix else "Top level"
    yield f"## {title}\n\n{_line(section.__doc__)}\n\n| key | type | default | |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        cells = (f"`{prefix}{name}`", _type(field), _default(field), _line(field.description))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
    for name, field in section.model_fields.items():
        for inner in sections(field.annotation):
            yield from _section(inner, f"{prefix}{name}.")


def _type(field: FieldInfo) -> str:
    signs = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}
    limits = [
        f"{sign} {getattr(rule, name)}"
        for rule in field.metadata
        for name, sign in signs.items()
        if getattr(rule, name, None) is not None
    ]
    return ", ".join([expected(field.annotation), *limits])


def _default(field: FieldInfo) -> str:
    value: Any = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, tuple | frozenset):
        value = list(value)
    return "see below" if isinstance(value, Section) else f"`{json.dumps(value)}`"


def _line(text: str | None) -> str:
    return " ".join((text or "").split())
