"""A linear layer that computes with the operators it is given, packed for inference, with an optional LoRA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.ops import Numerics, Operators
from lockstep.ops.operators import Split


@dataclass(frozen=True)
class _PackedWeight:
    """A weight laid out for inference, and what it was made from: stale as soon as one of these differs."""

    source: Tensor
    version: int
    address: int
    """Of its memory: `weight.data = other` changes it and counts as no version. 0 in a capture: there is none."""
    numerics: Numerics
    dtype: torch.dtype
    packed: Any

    def fits(self, weight: Tensor, ops: Operators, dtype: torch.dtype) -> bool:
        same = self.source is weight and self.version == weight._version
        same = same and (not self.address or self.address == weight.data_ptr())
        return same and self.numerics == ops.numerics and self.dtype == dtype


class WeightCache:
    """At most one packed copy of a weight; used only without gradient, dropped when the weight changes."""

    def __init__(self, pack: Callable[[Operators, Tensor, torch.dtype], Any] | None = None) -> None:
        """pack: lays the weight out; by default `ops.pack`."""
        self._pack = pack or (lambda ops, weight, dtype: ops.pack(weight, dtype))
        self._entry: _PackedWeight | None = None

    def fill(self, weight: Tensor, ops: Operators, dtype: torch.dtype) -> None:
        if self._entry is not None and self._entry.fits(weight, ops, dtype):
            return
        self._entry = None
        with torch.no_grad():
            packed = self._pack(ops, weight.detach(), dtype)
        self._entry = _PackedWeight(weight, weight._version, weight.data_ptr(), ops.numerics, dtype, packed)

    def get(self, weight: Tensor, ops: Operators, dtype: torch.dtype) -> Any:
        """The packed weight, or the weight itself where none fits or gradients are recorded."""
        if self._entry is None or torch.is_grad_enabled():
            return weight
        if self._entry.fits(weight, ops, dtype):
            return self._entry.packed
        self._entry = None
        return weight

    def clear(self) -> None:
        self._entry = None


def pack_weight(ops: Operators, weight: Tensor, dtype: torch.dtype, split: Split | None) -> Any:
    """A weight laid out for inference, or what this device holds of it where the operators cut it so."""
    cut = None if split is None else ops.cut.get(split)
    return (ops.pack if cut is None else cut.pack)(weight, dtype)


def unset(*shape: int) -> nn.Parameter:
    """A parameter without memory (on the meta device): `random_decoder` draws its values or `fill` loads them."""
    return nn.Parameter(torch.empty(shape, device="meta"))


class Linear(nn.Module):
    """y = x W^T + b. weight [N, K], bias [N] or None."""

    def __init__(self, inputs: int, outputs: int, bias: bool = False):
        super().__init__()
        self.weight = unset(outputs, inputs)
        self.bias = unset(outputs) if bias else None
        self.lora: LoraPair | None = None
        self.split: Split | None = None  # how tensor parallelism cuts the weight
        self.cache = WeightCache(self._pack)

    def forward(self, ops: Operators, x: Tensor) -> Tensor:
        """x [T, K] -> [T, N] in x's dtype."""
        cut = None if self.split is None else ops.cut.get(self.split)
        y = (ops.linear if cut is None else cut.linear)(x, self.cache.get(self.weight, ops, x.dtype), self.bias)
        return y if self.lora is None else y + self.lora(ops, x)

    def prepare(self, ops: Operators, dtype: torch.dtype) -> None:
        """Pack the weight for inference in this dtype; nothing to do where it already is."""
        self.cache.fill(self.weight, ops, dtype)

    def _pack(self, ops: Operators, weight: Tensor, dtype: torch.dtype) -> Any:
        return pack_weight(ops, weight, dtype, self.split)


class LoraPair(nn.Module):
    """The low-rank update of a linear layer: scale * B (A x), A [r, K], B [N, r] (https://arxiv.org/abs/2106.09685)."""

    def __init__(self, a: Tensor, b: Tensor, scale: float):
        super().__init__()
        self.a, self.b, self.scale = nn.Parameter(a), nn.Parameter(b), scale

    def forward(self, ops: Operators, x: Tensor) -> Tensor:
        update = ops.linear(ops.linear(x, self.a), self.b)
        return update * torch.tensor(self.scale, dtype=x.dtype)
