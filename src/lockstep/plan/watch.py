"""Watches code that runs on meta tensors: the bytes alive at every moment, and what every operator costs.

On the meta device real code runs without memory and without arithmetic: tensors have shapes and dtypes, and die when
the last reference to them does. So the live bytes seen here are those of the real run, whatever the code does: saved
activations, views, in-place sums, packed copies of weights.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.ops.costs import Cost, cost

_META = torch.device("meta")


@dataclass(frozen=True)
class OperatorCost:
    """What all calls of one operator cost: floating-point operations, and bytes read and written."""

    calls: int = 0
    flops: float = 0.0
    bytes: int = 0

    def after(self, one: Cost) -> OperatorCost:
        """With one more call."""
        return OperatorCost(self.calls + 1, self.flops + one.flops, self.bytes + one.bytes)


@dataclass(frozen=True)
class Peak:
    """The moment with the most live bytes: where it was, the operator that ran, and the bytes by kind."""

    bytes: int
    where: str
    operator: str
    kinds: dict[str, int]


@dataclass
class _Storage:
    """One allocation: its kind, bytes, and the moments (calls of operators so far) of its birth and death."""

    kind: str
    bytes: int
    born: int
    died: int | None = None


class Watch(TorchDispatchMode):
    """Records every operator that runs inside, and keeps all that is made inside on the meta device.

    Operators on real tensors alone (tokens, positions) run as they are, so what is computed from them is true; one
    that meets a meta tensor runs on the meta device.

    here: the moment as (where, kind of what is allocated now). A number that is read from a meta tensor, such as a
    loss, is 1.
    """

    def __init__(self, here: Callable[[], tuple[str, str]]) -> None:
        super().__init__()
        self.operators: dict[str, OperatorCost] = {}
        self.live, self.history = 0, array("q")
        self._here = here
        self._alive: dict[int, _Storage] = {}
        self._all: list[_Storage] = []
        self._most, self._moment, self._where, self._operator = 0, 0, "", ""

    def hold(self, tensors: Iterable[Tensor], kind: str) -> None:
        """Say of what kind tensors are, whether or not they were seen before."""
        for tensor in tensors:
            self._seen(tensor).kind = kind

    def peak(self) -> Peak:
        """The largest moment so far."""
        kinds: dict[str, int] = {}
        for one in self._all:
            if one.born < self._moment and (one.died is None or one.died >= self._moment):
                kinds[one.kind] = kinds.get(one.kind, 0) + one.bytes
        return Peak(self._most, self._where, self._operator, kinds)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        hollow = kwargs.get("device") == _META  # so in the real run too
        inputs = _tensors((args, tuple(kwargs.values())))
        unreal = not inputs or any(t.is_meta for t in inputs)
        if unreal:
            if func is torch.ops.aten._to_copy.default and kwargs.get("device", _META).type == "cpu":
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)  # for `tolist`
            if func is torch.ops.aten._local_scalar_dense.default:
                return 1 if not args[0].is_floating_point() else 1.0
            args, kwargs = _to_meta(args), {name: _to_meta(value) for name, value in kwargs.items()}
        if func is torch.ops.lockstep.scaled.default and args[0].dtype == args[2]:
            result = args[0]  # times the gradient of the objective, which is 1: the real run returns it as it is
        else:
            result = func(*args, **kwargs)
        outputs = _tensors(result)
        for tensor in (*inputs, *outputs):
            self._seen(tensor, hollow)
        self._note_moment(func)
        price = cost(func, args, kwargs, result)
        if price.bytes:
            self.operators[func.name()] = self.operators.get(func.name(), OperatorCost()).after(price)
        return result

    def _note_moment(self, func: Any) -> None:
        self.history.append(self.live)
        if self.live > self._most:
            self._most, self._moment = self.live, len(self.history)
            self._where, self._operator = self._here()[0], func.name()

    def _seen(self, tensor: Tensor, hollow: bool = False) -> _Storage:
        """The record of a tensor's storage, made when it is first seen."""
        memory = tensor.untyped_storage()
        key = memory._cdata
        if key not in self._alive:
            one = self._alive[key] = _Storage(self._here()[1], 0 if hollow else memory.nbytes(), len(self.history))
            self._all.append(one)
            self.live += one.bytes
            weakref.finalize(memory, partial(self._gone, key, one)).atexit = False
        return self._alive[key]

    def _gone(self, key: int, one: _Storage) -> None:
        one.died = len(self.history)
        self.live -= one.bytes
        del self._alive[key]


def _tensors(values: Any) -> list[Tensor]:
    """The tensors of an operator's arguments or results: themselves, or in a list."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, (list, tuple)):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _to_meta(value: Any) -> Any:
    """An argument as the meta device takes it."""
    if isinstance(value, torch.device):
        return _META
    if isinstance(value, Tensor):
        if value.is_meta:
            return value
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return type(value)(map(_to_meta, value)) if type(value) in (list, tuple) else value
