"""What `lockstep.plan` gives out: the types that its functions take and give back are there too."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

from lockstep import plan


def _classes(hint: Any) -> Iterator[type]:
    """Of this package, in an annotation."""
    if isinstance(hint, type) and hint.__module__.startswith(("lockstep.plan", "lockstep.parallel")):
        yield hint
    for inner in get_args(hint):
        yield from _classes(inner)


def _hints(thing: Any) -> Iterator[Any]:
    """Of a function, or of the fields, properties and methods of a class."""
    if not inspect.isclass(thing):
        yield from get_type_hints(thing).values()
        return
    yield from get_type_hints(thing).values() if is_dataclass(thing) else ()
    for name, member in inspect.getmembers(thing):
        function = getattr(member, "fget", None) or getattr(member, "func", None) or member
        if not name.startswith("_") and inspect.isfunction(function):
            with suppress(NameError):  # of a type that is imported for the checker alone, as what is private is
                yield get_type_hints(function).get("return")


def test_every_type_that_a_user_meets_is_exported() -> None:
    given = {getattr(plan, name) for name in plan.__all__}
    met = {kind for thing in given for hint in _hints(thing) for kind in _classes(hint)}
    assert {plan.Step, plan.Event, plan.Device, plan.Keep} <= met, "the walk finds what is nested"
    assert {kind.__name__ for kind in met} <= {kind.__name__ for kind in given if inspect.isclass(kind)}
