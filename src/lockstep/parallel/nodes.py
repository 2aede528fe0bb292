"""Sums over ranks as operators: what a captured graph has in the place of `Axis.add`.

One operator begins a sum, another waits for it, so that computation can stand between them; `all_add_coalesced` begins
several as one message. An operator's arguments are tensors, numbers and text, so a group is named by text: in a graph
by its axis, which is the same on every rank and in every run, in a program that runs by `handle`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.ops.cut_linear import Add
from lockstep.ops.spread_experts import Kept, Late
from lockstep.parallel.collectives import Axis, Sum

LIBRARY = torch.library.Library("lockstep_mesh", "DEF")
_HANDLES: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class Group:
    """An axis that programs may name, by `handle`, as long as this lives. A rank makes its own."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.handle = axis, f"{axis.name}#{next(_NUMBERS)}"
        self.begun: dict[int, Message] = {}
        """What is on its way, by the address of the memory that each result will be written to."""
        self.kept: Kept | None = None
        self.late: list[Late] = []
        """What the experts of the block that runs keep, and gradients that they put off (`expert_nodes`)."""
        _HANDLES[self.handle] = self

    def begin(self, outs: Sequence[Tensor], message: Message) -> None:
        for out in outs:
            self.begun[out.data_ptr()] = message

    def wait(self, out: Tensor) -> Tensor:
        """out, with what was begun for it."""
        self.begun.pop(out.data_ptr()).finish()
        return out


class Message:
    """What was begun and has to be ended, once."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end: Callable[[], None] | None = end

    def finish(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end()


def adding(axis: str) -> Add:
    """`Axis.add` for a graph that is being captured: the operators below."""

    def add(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        begun = torch.ops.lockstep_mesh.all_add(tensor, dtype, axis)
        total: Tensor = torch.ops.lockstep_mesh.wait(begun, axis)
        return total

    return add


def define(name: str, arguments: str, shape: Callable[..., Tensor], begin: Callable[..., Message]) -> None:
    """An operator `NAME(arguments, str group) -> Tensor` that begins something, and its form with `out`.

    shape: an empty tensor like the result, of the arguments. begin: of the axis, the memory of the result and the
    arguments.
    """

    def run(group: Group, out: Tensor, *given: Any) -> None:
        group.begin([out], begin(group.axis, out, *given))

    define_at_once(name, arguments, shape, run)


def define_at_once(name: str, arguments: str, shape: Callable[..., Tensor], run: Callable[..., None]) -> None:
    """`define` of an operator that nobody waits for. run: of the group, the memory of the result and the arguments."""

    def into(*given: Any, out: Tensor) -> Tensor:
        run(_HANDLES[given[-1]], out, *given[:-1])
        return out

    LIBRARY.define(f"{name}({arguments}, str group) -> Tensor")
    LIBRARY.define(f"{name}.out({arguments}, str group, *, Tensor(a!) out) -> Tensor(a!)")
    torch.library.register_fake(f"lockstep_mesh::{name}", lambda *given: shape(*given[:-1]), lib=LIBRARY)
    LIBRARY.impl(name, lambda *given: into(*given, out=shape(*given[:-1])), "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}.out", into, "CompositeExplicitAutograd")


def define_several(
    name: str, arguments: str, shape: Callable[..., Tensor], begin: Callable[..., Message], form: str
) -> None:
    """`define` of tensors that go as one message: `NAME(Tensor[] xs, arguments, str group) -> Tensor[]`. shape: of one
    of them; begin: of all. form: the operator of one tensor."""

    def shapes(xs: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        return [shape(x, *rest[:-1]) for x in xs]

    def into(*given: Any, out: Sequence[Tensor]) -> None:
        group = _HANDLES[given[-1]]
        group.begin(out, begin(group.axis, out, *given[:-1]))

    def anew(*given: Any) -> list[Tensor]:
        outs = shapes(*given)
        into(*given, out=outs)
        return outs

    LIBRARY.define(f"{name}(Tensor[] xs, {arguments}, str group) -> Tensor[]")
    LIBRARY.define(f"{name}.out(Tensor[] xs, {arguments}, str group, *, Tensor(a!)[] out) -> ()")
    torch.library.register_fake(f"lockstep_mesh::{name}", shapes, lib=LIBRARY)
    LIBRARY.impl(name, anew, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}.out", into, "CompositeExplicitAutograd")
    alone = getattr(torch.ops.lockstep_mesh, form).default
    COALESCED[alone] = getattr(torch.ops.lockstep_mesh, name).default


def define_results(
    name: str, arguments: str, count: int, shapes: Callable[..., tuple[Tensor, ...]], run: Callable[..., None]
) -> None:
    """An operator of several results that nobody waits for, `NAME(arguments, str group) -> (Tensor, ...)`, and its form
    with `out0`, `out1`, ...

    shapes: empty tensors like the results, of the arguments. run: of the axis, the memory of the results and the
    arguments.
    """
    names, marks = [f"out{i}" for i in range(count)], "abcdefgh"[:count]
    results = ", ".join(["Tensor"] * count)
    outs = ", ".join(f"Tensor({mark}!) {out}" for mark, out in zip(marks, names, strict=True))
    written = ", ".join(f"Tensor({mark}!)" for mark in marks)

    def into(*given: Any, **memory: Tensor) -> tuple[Tensor, ...]:
        out = tuple(memory[one] for one in names)
        run(_HANDLES[given[-1]].axis, out, *given[:-1])
        return out

    def anew(*given: Any) -> tuple[Tensor, ...]:
        return into(*given, **dict(zip(names, shapes(*given[:-1]), strict=True)))

    LIBRARY.define(f"{name}({arguments}, str group) -> ({results})")
    LIBRARY.define(f"{name}.out({arguments}, str group, *, {outs}) -> ({written})")
    torch.library.register_fake(f"lockstep_mesh::{name}", lambda *given: shapes(*given[:-1]), lib=LIBRARY)
    LIBRARY.impl(name, anew, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}.out", into, "CompositeExplicitAutograd")


COALESCED: dict[Any, Any] = {}
"""Operators, and the form of each that takes a list."""


def sum_into(total: Sum, outs: Sequence[Tensor]) -> Message:
    """A sum that was begun, whose parts, one after the other, belong to these tensors."""

    def end() -> None:
        flat = total.wait().reshape(-1)
        for out, part in zip(outs, flat.split([out.numel() for out in outs]), strict=True):
            out.view(-1).copy_(part)

    return Message(end)


def _add(axis: Axis, out: Tensor, x: Tensor, dtype: torch.dtype) -> Message:
    return sum_into(axis.begin_add(x, dtype), [out])


def _add_several(axis: Axis, outs: Sequence[Tensor], xs: Sequence[Tensor], dtype: torch.dtype) -> Message:
    return sum_into(axis.begin_add(torch.cat([x.reshape(-1) for x in xs]), dtype), outs)


def _empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _wait(begun: Tensor, group: str) -> Tensor:
    return _HANDLES[group].wait(begun)


define("all_add", "Tensor x, ScalarType dtype", _empty, _add)
define_several("all_add_coalesced", "ScalarType dtype", _empty, _add_several, "all_add")
LIBRARY.define("wait(Tensor begun, str group) -> Tensor")
torch.library.register_fake("lockstep_mesh::wait", lambda begun, group: begun, lib=LIBRARY)
LIBRARY.impl("wait", _wait, "CompositeExplicitAutograd")
