"""YAML without its traps: the core schema of YAML 1.2, and no key twice.

YAML 1.1, which PyYAML reads, takes `1e-3` for a string, `no` for false, `1:30` for 90, `010` for 8 and a
date for a date. Here a plain value is null, true/false, a decimal integer, a number, or else a string.
"""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from lockstep.errors import LockstepError

_PLAIN = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+(_[0-9]+)*", "-+0123456789"),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("tag:yaml.org,2002:merge", r"<<", "<"),
)


def parse(text: str, source: str) -> Any:
    """The value that a YAML text holds. `source` names the text in errors (`LockstepError`)."""
    try:
        value = yaml.load(text, _Loader)
        json.dumps(value)  # a tree of plain values: no alias to itself, no set, no bytes
        return value
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}, line {mark.line + 1}" if mark else source
        raise LockstepError(f"{place}: not valid YAML: {error.problem or error}") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise LockstepError(f"{source}: not valid YAML: {error}") from error


def parse_scalar(text: str) -> Any:
    """What a plain value `text` means in a YAML file: null, a bool, a number or a string."""
    loader = _Loader("")
    return loader.construct_object(yaml.ScalarNode(loader.resolve(yaml.ScalarNode, text, (True, False)), text))


def dump(value: Any, flow: bool | None = False) -> str:
    """The YAML text of a tree of dicts, lists and plain values; `parse` gives back an equal tree. flow: None writes
    what holds plain values only on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120, default_flow_style=flow)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own attribute

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[Any, int] = {}
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key, line = self.construct_object(key_node, deep=True), key_node.start_mark.line + 1
            if not isinstance(key, str):
                raise yaml.MarkedYAMLError(problem=f"the key {key!r} is not a name", problem_mark=key_node.start_mark)
            if key in first:
                problem = f"the key {key!r} stands here and in line {first[key]}; keep one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key_node.start_mark)
            first[key] = line
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = {**yaml.SafeDumper.yaml_implicit_resolvers}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(node.value)


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(node.value.lower().replace(".inf", "inf").replace(".nan", "nan"))


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)
for _tag, _pattern, _first in _PLAIN:
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))
    # Added after YAML 1.1's own: a string is quoted when either version would read it as something else.
    _Dumper.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), list(_first))
