"""A case of the operator bench: an operator, PyTorch's own beside it, and what it works on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from lockstep.ops import Operators

Run = Callable[..., object]


@dataclass(frozen=True)
class Sizes:
    """Tokens of a batch and of its sequences, and the model's widths."""

    tokens: int = 2048
    length: int = 512
    width: int = 576
    ffn: int = 1536
    heads: int = 9
    kv_heads: int = 3
    dim: int = 64
    vocabulary: int = 8192


QUICK = Sizes(tokens=128, length=64, width=64, ffn=128, heads=4, kv_heads=2, dim=16, vocabulary=256)


@dataclass(frozen=True)
class Case:
    """An operator on inputs of these shapes.

    ours(ops, *inputs) and theirs(*inputs) compute the same. flops: of the forward (the backward has twice that); None:
    the operator is bound by memory and its bytes are counted. gradient: whether it has a backward. prepare: what the
    contract's side does once to its inputs (packing weights for inference). wide: so many inputs, the first ones, are
    float32 in every dtype. moved: elements that the forward and the
    backward read and write, where not those of all inputs and of a result like the first. why: why PyTorch may be
    faster.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    ours: Run
    theirs: Run
    flops: float | None = None
    gradient: bool = True
    whole: bool = False
    prepare: Callable[[Operators, Sequence[Tensor]], Sequence[object]] | None = None
    wide: int = 0
    moved: tuple[int, int] | None = None
    why: str = ""


PACKS = (
    "a training product lays out its weight on every call and its left-hand side for every 1,024 columns; PyTorch's is "
    "MKL's in float32"
)
PYTHON = (
    "both sides move the same bytes; a call that keeps a gradient goes through a function in Python, some tens of "
    "microseconds each way (a compiled program has none)"
)
ORDER = "the order of its sum is fixed, PyTorch's follows the number of threads"
