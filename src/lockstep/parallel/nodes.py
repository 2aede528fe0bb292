"""Sums over ranks as operators: what a captured graph has in the place of `Axis.add`.

One operator begins a sum, another waits for it, so that computation can stand between them; `all_add_coalesced` begins
several as one message. An operator's arguments are tensors, numbers and text, so a group is named by text: in a graph
by its axis, which is the same on every rank and in every run, in a program that runs by `handle`.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from lockstep.ops.cut_linear import Add
from lockstep.parallel.collectives import Axis, Sum

_LIBRARY = torch.library.Library("lockstep_mesh", "DEF")
_HANDLES: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()


class Group:
    """An axis that programs may name, by `handle`, as long as this lives. A rank makes its own."""

    def __init__(self, axis: Axis) -> None:
        self.axis, self.handle = axis, f"{axis.name}#{next(_NUMBERS)}"
        self.begun: dict[int, _Message] = {}
        """Sums on their way, by the address of the memory that each result will be written to."""
        _HANDLES[self.handle] = self


class _Message:
    """Tensors that are summed as one."""

    def __init__(self, total: Sum, outs: Sequence[Tensor]) -> None:
        self.total, self.outs = total, outs
        self.done = False

    def finish(self) -> None:
        """Write the sums where they belong."""
        if self.done:
            return
        flat, self.done = self.total.wait().reshape(-1), True
        for out, part in zip(self.outs, flat.split([out.numel() for out in self.outs]), strict=True):
            out.view(-1).copy_(part)


def adding(axis: str) -> Add:
    """`Axis.add` for a graph that is being captured: the operators below."""

    def add(tensor: Tensor, dtype: torch.dtype) -> Tensor:
        begun = torch.ops.lockstep_mesh.all_add(tensor, dtype, axis)
        total: Tensor = torch.ops.lockstep_mesh.wait(begun, axis)
        return total

    return add


_LIBRARY.define("all_add(Tensor x, ScalarType dtype, str group) -> Tensor")
_LIBRARY.define("all_add.out(Tensor x, ScalarType dtype, str group, *, Tensor(a!) out) -> Tensor(a!)")
_LIBRARY.define("all_add_coalesced(Tensor[] xs, ScalarType dtype, str group) -> Tensor[]")
_LIBRARY.define("all_add_coalesced.out(Tensor[] xs, ScalarType dtype, str group, *, Tensor(a!)[] out) -> ()")
_LIBRARY.define("wait(Tensor begun, str group) -> Tensor")


@torch.library.register_fake("lockstep_mesh::all_add", lib=_LIBRARY)
def _empty(x: Tensor, dtype: torch.dtype, group: str) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.register_fake("lockstep_mesh::all_add_coalesced", lib=_LIBRARY)
def _empties(xs: Sequence[Tensor], dtype: torch.dtype, group: str) -> list[Tensor]:
    return [x.new_empty(x.shape, dtype=dtype) for x in xs]


@torch.library.register_fake("lockstep_mesh::wait", lib=_LIBRARY)
def _same(begun: Tensor, group: str) -> Tensor:
    return begun


def _begin(xs: Sequence[Tensor], dtype: torch.dtype, group: str, outs: Sequence[Tensor]) -> None:
    here = _HANDLES[group]
    sent = xs[0] if len(xs) == 1 else torch.cat([x.reshape(-1) for x in xs])
    message = _Message(here.axis.begin_add(sent, dtype), outs)
    for out in outs:
        here.begun[out.data_ptr()] = message


def _begin_one(x: Tensor, dtype: torch.dtype, group: str, *, out: Tensor) -> Tensor:
    _begin([x], dtype, group, [out])
    return out


def _begin_several(xs: Sequence[Tensor], dtype: torch.dtype, group: str, *, out: Sequence[Tensor]) -> None:
    _begin(xs, dtype, group, out)


def _begin_one_anew(x: Tensor, dtype: torch.dtype, group: str) -> Tensor:
    return _begin_one(x, dtype, group, out=_empty(x, dtype, group))


def _begin_several_anew(xs: Sequence[Tensor], dtype: torch.dtype, group: str) -> list[Tensor]:
    outs = _empties(xs, dtype, group)
    _begin(xs, dtype, group, outs)
    return outs


def _wait(begun: Tensor, group: str) -> Tensor:
    _HANDLES[group].begun.pop(begun.data_ptr()).finish()
    return begun


for _name, _kernel in (
    ("all_add", _begin_one_anew),
    ("all_add.out", _begin_one),
    ("all_add_coalesced", _begin_several_anew),
    ("all_add_coalesced.out", _begin_several),
    ("wait", _wait),
):
    _LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")

ALL_ADD = torch.ops.lockstep_mesh.all_add.default
ALL_ADD_COALESCED = torch.ops.lockstep_mesh.all_add_coalesced.default
