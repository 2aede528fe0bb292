"""A mapping from a file as a value: every key known, every field there and of its type, nothing converted."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from lockstep.config.check import expected
from lockstep.errors import LockstepError

Kind = TypeVar("Kind")


def typed(kind: type[Kind], given: Any, what: str) -> Kind:
    """``given`` as the dataclass ``kind``. what: how messages name it. Raises LockstepError that names the key."""
    known_keys(given, [field.name for field in fields(kind)], what)  # type: ignore[arg-type]
    try:
        return TypeAdapter(kind).validate_json(json.dumps(dict(given)), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        name, *within = map(str, first["loc"] or ("",))
        if first["type"] == "missing":
            raise LockstepError(f"{what} has no {name}; it is needed.") from error
        if not name:
            raise LockstepError(f"{what} is {given!r:.60}: {first['msg']}.") from error
        hint: Any = get_type_hints(kind)[name]
        for _ in within:  # into a mapping's values, or a list's entries
            hint = get_args(hint)[get_origin(hint) is dict]
        place = ".".join((what, name, *within))
        raise LockstepError(f"{place} is {first['input']!r:.60}, expected {expected(hint)}.") from error
    except (TypeError, ValueError, RecursionError) as error:  # values that no file can hold
        raise LockstepError(f"{what} is {given!r:.60}; give plain numbers, text and lists.") from error


def is_version(given: Any, version: int) -> bool:
    """Whether a file says that it is of this version: the whole number, which ``true`` and ``1.0`` are not."""
    return type(given) is int and given == version


def known_keys(given: Any, known: Collection[str], what: str) -> Mapping[str, Any]:
    """``given``, a mapping of no other keys. Raises LockstepError that says the nearest."""
    if not isinstance(given, Mapping):
        raise LockstepError(f"{what} is {given!r:.60}, expected a mapping.")
    for key in given:
        if key not in known:
            near = get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise LockstepError(f"{what} has an unknown key {key!r:.60}: the nearest is {near!r}.")
    return given
