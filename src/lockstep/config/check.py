"""A plain tree of values against a section: the validated section, or an error that teaches.

Two steps: unknown keys are looked for first, over the whole tree, since a misspelt key makes every other
message misleading; then pydantic validates, and its errors are told in our words.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from lockstep.config.names import fields, nearest, sections
from lockstep.config.section import Section
from lockstep.errors import LockstepError

S = TypeVar("S", bound=Section)


def check(section: type[S], tree: dict[str, Any], source: str) -> S:
    """The section that `tree` describes. Every mistake in it is named in one `LockstepError`.

    Strict: no value is converted, but a whole number may stand for a float and a list for a tuple.
    """
    unknown = list(_unknown(section, [section], tree, ""))
    if unknown:
        raise LockstepError(_told(unknown, source))
    try:
        # Through JSON, because pydantic's strict mode would otherwise refuse lists for tuples and text for paths.
        return section.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        raise LockstepError(_told(list(_wrong(section, tree, error.errors(include_url=False))), source)) from error


def expected(annotation: Any) -> str:
    """A type in words: `a number, or null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return expected(arguments[0])
    if origin is Literal:
        return "one of " + ", ".join(json.dumps(value) for value in arguments)
    if origin in (Union, UnionType):
        return ", or ".join(dict.fromkeys(expected(argument) for argument in arguments))
    if origin in (list, tuple, set, frozenset):
        items = [argument for argument in arguments if argument is not Ellipsis]
        return f"a list (each {', or '.join(dict.fromkeys(map(expected, items)))})"
    if origin is dict:
        return f"a mapping (each value {expected(arguments[1])})"
    if sections(annotation):
        return "a mapping"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text", NoneType: "null"}
    return words.get(annotation) or ("a path" if getattr(annotation, "__name__", "") == "Path" else str(annotation))


def _told(mistakes: list[str], source: str) -> str:
    lines = list(dict.fromkeys(mistakes))
    head = f"{source}: " if len(lines) == 1 else f"{source}: {len(lines)} mistakes\n  "
    return head + "\n  ".join(lines) + "\n  `lockstep config reference` describes every key."


def _unknown(root: type[Section], here: list[type[Section]], tree: dict[str, Any], prefix: str) -> Iterator[str]:
    """One message for each key of `tree` that none of the sections `here` has."""
    known = {name: field for section in here for name, field in section.model_fields.items()}
    for key, value in tree.items():
        if key not in known:
            yield _advice(root, f"{prefix}{key}", list(known), prefix)
        elif isinstance(value, dict):
            inner = [s for section in here if key in section.model_fields for s in _parts(section, key)]
            if inner:
                yield from _unknown(root, inner, value, f"{prefix}{key}.")


def _parts(section: type[Section], key: str) -> list[type[Section]]:
    return sections(section.model_fields[key].annotation)


def _advice(root: type[Section], key: str, siblings: list[str], prefix: str) -> str:
    near, alike = nearest(key, [name for name, _ in fields(root)])
    if alike:
        return f"unknown key `{key}`: did you mean `{near}`?"
    place = f"`{prefix.rstrip('.')}` has" if prefix else "the keys here are"
    return f"unknown key `{key}`: the nearest is `{near}`; {place} {', '.join(siblings)}"


def _wrong(section: type[Section], tree: dict[str, Any], errors: list[ErrorDetails]) -> Iterator[str]:
    """One message for each value that pydantic refused.

    A union reports all its branches: of a mapping only what is wrong inside it is of interest, and of a plain
    value only that no branch takes it.
    """
    placed = [(_path(section, error["loc"]), error) for error in errors]
    told: set[tuple[str, ...]] = set()
    for path, error in placed:
        value, found = _at(tree, path)
        branch = error["type"].endswith("_type")
        inside = [other for other, e in placed if other[: len(path)] == path and e is not error]
        if branch and (path in told or (isinstance(value, dict) and inside)):
            continue
        told.add(path)
        yield _message(section, path, value if found else None, error)


def _message(section: type[Section], path: tuple[str, ...], value: Any, error: ErrorDetails) -> str:
    key = "".join(f"[{part}]" if part.isdigit() else f".{part}" for part in path).lstrip(".")
    annotations = {name: field.annotation for name, field in fields(section)}
    wanted = expected(annotations[key]) if key in annotations else None
    match error["type"]:
        case "missing":
            return f"`{key}` is missing: expected {wanted}"
        case "value_error":
            reason = str(error["ctx"]["error"]) if "ctx" in error else error["msg"]
            return f"`{key}`: {reason}" if key else reason
        case kind if wanted and (kind.endswith(("_type", "_parsing")) or kind in ("literal_error", "int_from_float")):
            return f"`{key}` is {_shown(value)}: expected {wanted}{_hint(key, value, kind)}"
        case _:
            limit = error["msg"].replace("Input should", "it should").replace("List should", "it should")
            limit = limit.partition(" after validation")[0]
            return f"`{key}` is {_shown(value)}: {limit}"


def _hint(key: str, value: Any, kind: str) -> str:
    """How to write what was meant, where that is plain."""
    if kind == "string_type" and isinstance(value, int | float):
        return f'; write {key}: "{value}"'
    if kind in ("list_type", "tuple_type") and isinstance(value, str):
        return f"; write {key}: {json.dumps([part.strip() for part in value.split(',')], ensure_ascii=False)}"
    return ""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    kind = {bool: "", int: "", float: "", str: "", NoneType: "", list: "the list ", dict: "the mapping "}[type(value)]
    return kind + (text if len(text) <= 80 else text[:77] + "...")


def _path(section: type[Section], location: tuple[int | str, ...]) -> tuple[str, ...]:
    """Pydantic's location without the names of union branches, which a user never wrote."""
    path: list[str] = []
    here = [section]
    for part in location:
        if isinstance(part, int):
            path.append(str(part))
        elif not path or any(part in s.model_fields for s in here):
            path.append(part)
            here = [inner for s in here if part in s.model_fields for inner in _parts(s, part)]
    return tuple(path)


def _at(tree: Any, path: tuple[str, ...]) -> tuple[Any, bool]:
    for part in path:
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and part.isdigit() and int(part) < len(tree):
            tree = tree[int(part)]
        else:
            return None, False
    return tree, True
