"""A caller's own code within a model: a class of his, a function put in the place of ours.

No hash tells what such code does (a closure, a function of another file), so it is equal to itself alone, and what
holds some is compiled anew in every process.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FunctionType
from typing import Any

_OURS = ("lockstep", "torch")


@dataclass(frozen=True, eq=False)
class OwnCode:
    """A class, a function or an object that is neither Lockstep's nor PyTorch's."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OwnCode) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def own_code(kind: type) -> list[OwnCode]:
    """What a class runs that is the caller's: classes it is made of, functions that were put into ours."""
    found: list[Any] = []
    for part in kind.__mro__:
        if not is_ours(part.__module__):
            found.append(part)
        elif not part.__module__.startswith("torch."):
            found += [f for f in vars(part).values() if type(f) is FunctionType and not is_ours(f.__module__)]
    return [OwnCode(one) for one in found]


def described(value: Any) -> str | OwnCode:
    """A class or function by its name, any other object by its class, if it is ours, and else as what it is."""
    named = value if isinstance(value, (type, FunctionType)) else type(value)
    name = f"{named.__module__}.{named.__qualname__}"
    plain = is_ours(named.__module__) and "<" not in name  # neither within a function nor a lambda
    return name if plain and (named is value or not callable(value)) else OwnCode(value)


def is_ours(module: str | None) -> bool:
    """Whether a module is Lockstep's, PyTorch's or the language's."""
    room = (module or "").partition(".")[0]
    return room in _OURS or room in sys.stdlib_module_names
