"""Products: `csrc/gemm.cpp`. A right-hand side is packed in panels [ceil(n / 16), k, 16]."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.ops.raw.define import define, same

_PANEL = 16


def panels(n: int) -> int:
    """Panels of sixteen columns that hold n."""
    return -(-n // _PANEL)


@define("pack_columns(Tensor source, ScalarType dtype) -> Tensor")
def pack_columns(source: Tensor, dtype: torch.dtype) -> Tensor:
    """source [n, k], a weight: contraction along its columns."""
    return source.new_empty(panels(source.shape[0]), source.shape[1], _PANEL, dtype=dtype)


@define("pack_rows(Tensor source, ScalarType dtype) -> Tensor")
def pack_rows(source: Tensor, dtype: torch.dtype) -> Tensor:
    """source [k, n]: contraction along its rows."""
    return source.new_empty(panels(source.shape[1]), source.shape[0], _PANEL, dtype=dtype)


@define("gemm(Tensor a, Tensor packed, int n, Tensor? bias, ScalarType dtype) -> Tensor")
def gemm(a: Tensor, packed: Tensor, n: int, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a [m, k] times packed (n columns), plus bias [n] -> [m, n] in dtype: a's, or float32."""
    same("packed", tuple(packed.shape), (panels(n), a.shape[1], _PANEL))
    return a.new_empty(a.shape[0], n, dtype=dtype)


@define("gemm_transposed(Tensor a, Tensor packed, int n) -> Tensor")
def gemm_transposed(a: Tensor, packed: Tensor, n: int) -> Tensor:
    """a [k, m] transposed times packed -> float32 [m, n]."""
    same("packed", tuple(packed.shape), (panels(n), a.shape[0], _PANEL))
    return a.new_empty(a.shape[1], n, dtype=torch.float32)


@define("gemm_transposed_add(Tensor a, Tensor packed, Tensor(a!) sum) -> ()")
def gemm_transposed_add(a: Tensor, packed: Tensor, sum: Tensor) -> None:
    """`gemm_transposed`, its chains going on from what sum [m, n] holds."""
    same("packed", tuple(packed.shape), (panels(sum.shape[1]), a.shape[0], _PANEL))


@define("column_sums(Tensor x) -> Tensor")
def column_sums(x: Tensor) -> Tensor:
    """x [rows, n] -> float32 [n]."""
    return x.new_empty(x.shape[1], dtype=torch.float32)
