"""Fused operators: the bytes of the chain they stand for, forward and backward, and float64 within rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.ops import PAGE, KVPages, Packed, Paged, fused, operators, plain
from lockstep.ops.gated import activation
from lockstep.ops.norm import layer_norm
from tests.ops.compare import differing, randn

OPS = operators("bitwise")
BATCH = Packed.of([37, 1, 20])
TABLE = randn(9, 40, 8, 2)
Case = tuple[list[tuple[int, ...]], Callable[..., Any], Callable[..., Any], Callable[..., Any]]


def residual(norm: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    def chain(x: Tensor, h: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        total = x.to(torch.promote_types(h.dtype, torch.float32)) + h
        return total, norm(total, *weights, h.dtype)

    return chain


# Shapes of the inputs, the fused operator, the chain of contract operators, and plain PyTorch.
CASES: dict[str, Case] = {
    "gate, up, SwiGLU": (
        [(58, 70), (75, 70), (75, 70)],
        lambda x, g, u: fused.linear_gated(x, g, u, "silu"),
        lambda x, g, u: OPS.gated(OPS.linear(x, g), OPS.linear(x, u), "silu"),
        lambda x, g, u: plain.gated(plain.linear(x, g), plain.linear(x, u), "silu"),
    ),
    "gate, up, GeGLU": (
        [(130, 900), (40, 900), (40, 900)],
        lambda x, g, u: fused.linear_gated(x, g, u, "gelu_tanh"),
        lambda x, g, u: OPS.gated(OPS.linear(x, g), OPS.linear(x, u), "gelu_tanh"),
        lambda x, g, u: plain.gated(plain.linear(x, g), plain.linear(x, u), "gelu_tanh"),
    ),
    "linear, bias, gelu": (
        [(58, 70), (75, 70), (75,)],
        lambda x, w, b: fused.linear_activation(x, w, b, "gelu_tanh"),
        lambda x, w, b: activation(OPS.linear(x, w, b), "gelu_tanh"),
        lambda x, w, b: plain.activation(plain.linear(x, w, b), "gelu_tanh"),
    ),
    "linear, silu": (
        [(58, 70), (75, 70)],
        lambda x, w: fused.linear_activation(x, w, None, "silu"),
        lambda x, w: activation(OPS.linear(x, w), "silu"),
        lambda x, w: plain.activation(plain.linear(x, w), "silu"),
    ),
    "residual, RMS norm": (
        [(58, 90), (58, 90), (90,)],
        lambda x, h, w: fused.add_rms_norm(x.float(), h, w, 1e-5, 1.0),
        residual(lambda s, w, dtype: OPS.rms_norm(s, w, 1e-5, 1.0, out_dtype=dtype)),
        residual(lambda s, w, dtype: plain.rms_norm(s, w, 1e-5, 1.0, out_dtype=dtype)),
    ),
    "residual, layer norm": (
        [(58, 90), (58, 90), (90,), (90,)],
        lambda x, h, w, b: fused.add_layer_norm(x.float(), h, w, b, 1e-5),
        residual(lambda s, w, b, dtype: layer_norm(s, w, b, 1e-5, out_dtype=dtype)),
        residual(lambda s, w, b, dtype: plain.layer_norm(s, w, b, 1e-5, out_dtype=dtype)),
    ),
    "norm of heads, rotation": (
        [(58, 3, 16), (16,)],
        lambda x, w: fused.norm_rope(x, w, BATCH.positions, TABLE, 1e-5, 1.0),
        lambda x, w: OPS.rope(OPS.rms_norm(x, w, 1e-5, 1.0), BATCH.positions, TABLE),
        lambda x, w: plain.rope(plain.rms_norm(x, w, 1e-5, 1.0), BATCH.positions, TABLE),
    ),
    "layer norm": (
        [(58, 90), (90,), (90,)],
        lambda x, w, b: layer_norm(x, w, b, 1e-5),
        lambda x, w, b: layer_norm(x, w, b, 1e-5),
        lambda x, w, b: plain.layer_norm(x, w, b, 1e-5),
    ),
}


def run(case: Callable[..., Any], inputs: list[Tensor]) -> list[Tensor]:
    """The outputs, and the gradients of fixed random projections of them."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    results = case(*leaves)
    outputs = list(results) if isinstance(results, tuple) else [results]
    gradients = [randn(5 + i, *y.shape).to(y.dtype) for i, y in enumerate(outputs)]
    torch.autograd.backward(outputs, gradients)
    return [*(y.detach() for y in outputs), *(x.grad for x in leaves)]  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_bytes_of_the_chain_and_float64(name: str, dtype: torch.dtype) -> None:
    shapes, one, chain, reference = CASES[name]
    inputs = [randn(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
    ours, theirs = run(one, inputs), run(chain, inputs)
    assert [differing(a, b) for a, b in zip(ours, theirs, strict=True)] == [0] * len(ours)
    # One rounding of a result and of what is rounded on the way (2^-24 or 2^-9 relative), and float32 chains of up to
    # 900 products, one of them fed by another: some ten units of the largest element.
    tolerance = 6e-6 if dtype == torch.float32 else 2e-2
    for mine, right in zip(ours, run(reference, [x.double() for x in inputs]), strict=True):
        assert (mine.double() - right).abs().max() <= tolerance * max(1.0, float(right.abs().max()))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 130), n=st.integers(1, 200), k=st.integers(1, 500), at=st.integers(0, 129),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_a_row_of_a_packed_product(rows: int, n: int, k: int, at: int, dtype: torch.dtype) -> None:
    """Inference: packed weights, nothing kept; a row alone has the bytes of the row in its batch and of the chain."""
    at %= rows
    x, bias = randn(0, rows, k, dtype=dtype), randn(3, n, dtype=dtype)
    gate, up = OPS.pack(randn(1, n, k), dtype), OPS.pack(randn(2, n, k), dtype)
    one = slice(at, at + 1)
    chain = OPS.gated(OPS.linear(x, gate), OPS.linear(x, up), "silu")
    assert differing(fused.linear_gated(x, gate, up, "silu"), chain) == 0
    assert differing(fused.linear_gated(x[one], gate, up, "silu"), chain[one]) == 0
    chain = activation(OPS.linear(x, gate, bias), "gelu_tanh")
    assert differing(fused.linear_activation(x, gate, bias, "gelu_tanh"), chain) == 0
    assert differing(fused.linear_activation(x[one], gate, bias, "gelu_tanh"), chain[one]) == 0


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 130), widths=st.tuples(*[st.integers(1, 100)] * 3), k=st.integers(1, 700),
    at=st.integers(0, 129), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_joint_products_and_a_product_that_joins_the_stream(
    rows: int, widths: tuple[int, int, int], k: int, at: int, dtype: torch.dtype
) -> None:
    """The bytes of one product after the other, and of a row alone."""
    one = slice(at % rows, at % rows + 1)
    x, stream = randn(0, rows, k, dtype=dtype), randn(1, rows, widths[0])
    weights = [OPS.pack(randn(2 + i, n, k), dtype) for i, n in enumerate(widths)]
    biases = [randn(5, widths[0], dtype=dtype), None, randn(6, widths[2], dtype=dtype)]
    panels = [weight.panels for weight in weights]
    apart = [OPS.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    for some in (slice(None), one):
        joint = torch.ops.lockstep.gemm_three(x[some], *panels, *widths, *biases)
        assert [differing(a, b[some]) for a, b in zip(joint, apart, strict=True)] == [0, 0, 0]
        total = torch.ops.lockstep.gemm_add(stream[some], x[some], panels[0])
        assert differing(total, stream[some] + OPS.linear(x[some], weights[0])) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turned_keys_in_their_pages(dtype: torch.dtype) -> None:
    """Two sequences, one in the middle, pages in any order; what no token belongs to stays as it was."""
    k, v = randn(0, 9, 2, 16, dtype=dtype), randn(1, 9, 2, 32, dtype=dtype)
    positions = torch.tensor([62, 63, 64, 65, 0, 1, 2, 3, 4], dtype=torch.int32)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    batch = Paged(positions, torch.tensor([0, 4, 9], dtype=torch.int32), table)
    rotary = randn(2, 2 * PAGE, 8, 2)
    one, chain = (KVPages(torch.full((5, 2, 16, PAGE), 7.0).to(dtype), torch.full((5, 2, PAGE, 32), 7.0).to(dtype))
                  for _ in range(2))  # fmt: skip
    fused.rope_write_kv(k, v, rotary, one, batch)
    OPS.write_kv(OPS.rope(k, positions, rotary), v, chain, batch)
    assert (differing(one.k, chain.k), differing(one.v, chain.v)) == (0, 0)
    assert bool((one.k[4] == 7).all())
    assert bool((one.k[3, :, :, :62] == 7).all())
    assert not bool((one.k[3, :, :, 62:] == 7).any())


def test_no_gradient_is_lost_in_silence() -> None:
    x = randn(0, 5, 16).requires_grad_()
    weight = OPS.pack(randn(1, 16, 16), torch.float32)
    for call in (
        lambda: fused.linear_gated(x, weight, weight, "silu"),
        lambda: fused.linear_activation(x, weight, None, "silu"),
    ):
        with pytest.raises(RuntimeError, match="has no gradient"):
            call()
