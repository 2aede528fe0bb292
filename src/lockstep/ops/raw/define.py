"""Define a raw operator from its schema and its shapes: the functional form, and `.out` derived from it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

_LIBRARY = torch.library.Library("lockstep", "DEF")

kernel = SimpleNamespace()
"""`kernel.NAME(...)` is `torch.ops.lockstep.NAME.default(...)` without the layers of Python around it: a third of the
time of a call of little work."""

Results = Tensor | tuple[Tensor, ...] | None
Shapes = Callable[..., Results]


def define(schema: str) -> Callable[[Shapes], Shapes]:
    """Register `torch.ops.lockstep.NAME` with this schema; the function below gives empty results of its shapes.

    The function is the operator on meta and fake tensors: it checks shapes and allocates, nothing else. An operator
    with results gets the overload `.out` with one more argument per result: `out`, or `out0`, `out1`, ...
    """

    def register(shapes: Shapes) -> Shapes:
        name, arguments, results = _parts(schema)
        _add(schema, name, shapes)
        setattr(kernel, name, getattr(torch.ops.lockstep, name).default._op)
        if results:
            _add(_out_schema(name, arguments, results), f"{name}.out", _into(shapes, results))
        return shapes

    return register


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`, which takes ten times as long to find that there is nothing to do."""
    return x if x.dtype is dtype else x.to(dtype)


def same(what: str, found: object, expected: object) -> None:
    """ValueError unless the two agree, in words like those of the kernels' own checks."""
    if found != expected:
        raise ValueError(f"{what}: expected {expected}, got {found}")


def _parts(schema: str) -> tuple[str, str, int]:
    """The name, the arguments' text and the number of results: Tensor, (Tensor, Tensor, ...) or ()."""
    head, result = schema.rsplit(" -> ", 1)
    name, arguments = head[:-1].split("(", 1)
    return name, arguments, result.count("Tensor")


def _out_schema(name: str, arguments: str, results: int) -> str:
    marks = "abcdefgh"[:results]
    names = ["out"] if results == 1 else [f"out{i}" for i in range(results)]
    outs = ", ".join(f"Tensor({mark}!) {out}" for mark, out in zip(marks, names, strict=True))
    given = ", ".join(f"Tensor({mark}!)" for mark in marks)
    return f"{name}.out({arguments}, *, {outs}) -> {given if results == 1 else f'({given})'}"


def _into(shapes: Shapes, results: int) -> Shapes:
    names = ["out"] if results == 1 else [f"out{i}" for i in range(results)]

    def run(*args: Any, **kwargs: Any) -> Results:
        outs = tuple(kwargs.pop(name) for name in names)
        expected: Any = shapes(*args, **kwargs)
        for name, out, right in zip(names, outs, (expected,) if results == 1 else expected, strict=True):
            same(name, (tuple(out.shape), out.dtype), (tuple(right.shape), right.dtype))
        return outs[0] if results == 1 else outs

    return run


def _add(schema: str, name: str, shapes: Shapes) -> None:
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    arguments = _parts(schema)[1].split("*, ")[0].split(", ")
    written = [i for i, argument in enumerate(arguments) if "!" in argument]

    def run(*args: Any, **kwargs: Any) -> Results:
        found = shapes(*args, **kwargs)
        results = found if isinstance(found, tuple) else (found,) if found is not None else [args[i] for i in written]
        if any(type(x) in (Tensor, Parameter) and not x.is_meta for x in results):
            raise RuntimeError(f"{name}: an argument is on the meta device and has no numbers, a result would be real")
        return found

    torch.library.register_fake(f"lockstep::{name}", run, lib=_LIBRARY)
