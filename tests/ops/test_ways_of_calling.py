"""The same bytes however an operator is called: no rows, other strides, other gradients, autocast, threads."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lockstep.ops import Operators, Packed, Routing, fused, operators
from lockstep.ops.linear import pack_to_keep
from tests.ops.compare import differing, randn
from tests.ops.test_gradients import CASES

OPS = operators("bitwise")
Case = tuple[list[tuple[int, ...]], Callable[..., Tensor]]


def values(case: Case, dtype: torch.dtype) -> list[Tensor]:
    return [randn(i, *shape, dtype=dtype) for i, shape in enumerate(case[0])]


def run(case: Case, inputs: list[Tensor], needs: list[bool] | None = None) -> list[Tensor | None]:
    """The output and the gradients of a fixed projection of it, of the inputs that need one."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(inputs, needs or [True] * len(inputs), strict=True)]
    y = case[1](OPS, *leaves)
    if any(x.requires_grad for x in leaves):
        y.backward(randn(5, *y.shape).to(y.dtype))
    return [y.detach(), *(x.grad for x in leaves)]


def same(a: list[Tensor | None], b: list[Tensor | None]) -> bool:
    """Where both have a tensor."""
    return all(x is None or y is None or differing(x, y) == 0 for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_strides_gradients_and_autocast_change_nothing(name: str) -> None:
    case = CASES[name]
    inputs = values(case, torch.bfloat16)
    right = run(case, inputs)
    strided = [torch.stack([x, x], dim=-1)[..., 0] for x in inputs]
    assert not any(x.is_contiguous() for x in strided if x.numel() > 1)
    assert same(run(case, strided), right)
    for i in range(len(inputs)):
        only = run(case, inputs, [j == i for j in range(len(inputs))])
        assert [g is not None for g in only[1:]] == [j == i for j in range(len(inputs))]
        assert same(only, right)
    assert same(run(case, inputs, [False] * len(inputs)), right)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(run(case, inputs), right)
    negated = [torch._neg_view(-x) for x in inputs]
    assert all(x.is_neg() for x in negated)
    assert same(run(case, negated), right)
    with torch.inference_mode():
        assert differing(case[1](OPS, *inputs), right[0]) == 0


def test_an_operator_without_results_reads_what_is_negated() -> None:
    """Of the bytes in memory it would make the negative of the right sum."""
    a, panels, sums = randn(0, 9, 20), randn(1, 1, 9, 16), [torch.zeros(20, 16) for _ in range(2)]
    torch.ops.lockstep.gemm_transposed_add(a, panels, sums[0])
    torch.ops.lockstep.gemm_transposed_add(torch._neg_view(-a), panels, sums[1])
    assert differing(*sums) == 0


EMPTY = Packed(torch.zeros(0, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
OFFSETS = torch.zeros(3, dtype=torch.int32)
NO_TOKENS = torch.zeros(0, dtype=torch.int64)
NOTHING: dict[str, Case] = {
    "linear": ([(0, 20), (33, 20), (33,)], lambda o, x, w, b: o.linear(x, w, b)),
    "linear to nothing": ([(5, 20), (0, 20)], lambda o, x, w: o.linear(x, w)),
    "linear over nothing": ([(5, 0), (33, 0), (33,)], lambda o, x, w, b: o.linear(x, w, b)),
    "rms_norm": ([(0, 20), (20,)], lambda o, x, w: o.rms_norm(x, w, 1e-5)),
    "gated": ([(0, 20), (0, 20)], lambda o, g, u: o.gated(g, u, "silu")),
    "gate and up": ([(0, 20), (33, 20), (33, 20)], lambda o, x, g, u: fused.linear_gated(x, g, u, "silu")),
    "embedding": ([(9, 20)], lambda o, w: o.embedding(NO_TOKENS, w, w.dtype)),
    "rope": ([(0, 2, 16)], lambda o, x: o.rope(x, EMPTY.positions, randn(1, 9, 8, 2))),
    "attention": ([(0, 2, 16), (0, 1, 16), (0, 1, 16)], lambda o, q, k, v: o.attention(q, k, v, EMPTY, 0.3)),
    "cross entropy": (
        [(0, 20), (33, 20)], lambda o, x, w: o.linear_cross_entropy(x, w, NO_TOKENS, torch.zeros(0))[0],
    ),
    "experts": ([(0, 20), (33, 20), (33, 20)], lambda o, x, *w: o.grouped_linear(x, w, OFFSETS)),
    "router": ([(0, 6)], lambda o, x: o.route(x.float(), Routing(2)).weights),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NOTHING)
def test_no_rows(name: str, dtype: torch.dtype) -> None:
    """What a sum of nothing is: zero, or the bias."""
    inputs = values(NOTHING[name], dtype)
    y, *gradients = run(NOTHING[name], inputs)
    assert y is not None
    right = inputs[2].expand_as(y) if name == "linear over nothing" else torch.zeros_like(y)
    assert differing(y, right) == 0
    for x, gradient in zip(inputs, gradients, strict=True):
        assert gradient is not None
        if name == "linear over nothing" and x.dim() == 1:
            assert gradient.any()
        else:
            assert not gradient.any()


def test_copies_of_packed_weights() -> None:
    x, weight = randn(0, 7, 20), randn(1, 33, 20)
    packed = pack_to_keep(weight, x.dtype)
    right = OPS.linear(x, weight)
    for again in (packed, copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        assert differing(OPS.linear(x, again), right) == 0


def some(ops: Operators = OPS) -> list[Tensor | None]:
    """A few kernels that share their tasks among threads."""
    return [part for name in ("linear tall", "attention", "cross entropy") for part in run(CASES[name], INPUTS[name])]


INPUTS = {name: values(CASES[name], torch.float32) for name in ("linear tall", "attention", "cross entropy")}


def test_many_threads_of_python_at_once() -> None:
    right = some()
    with ThreadPoolExecutor(6) as pool:
        assert all(same(found, right) for found in pool.map(lambda _: some(), range(24)))
