"""Attention over pages of latents: the bits of packed attention with one key head, and agreement with float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.ops import PAGE, LatentPages, Operators, Packed, Paged, operators
from tests.ops.compare import differing, randn
from tests.ops.test_invariance import DTYPES, THREADS, chunked, threads

OPS = operators("bitwise")


def paged(
    ops: Operators, q: Tensor, latents: Tensor, chunks: list[int], scale: float, v_dim: int, fill: float = 0.0
) -> Tensor:
    """The output [T, H, v_dim] of a sequence computed chunk by chunk over pages that start full of `fill`."""
    count = -(-len(q) // PAGE)
    pages = LatentPages.zeros(count + 2, latents.shape[1], latents.dtype)
    pages.rows.fill_(fill)
    table = torch.randperm(count + 2, generator=torch.Generator().manual_seed(len(q)))[None, :count].to(torch.int32)
    outputs, at = [], 0
    for chunk in chunks:
        rows = slice(at, at + chunk)
        batch = Paged(
            torch.arange(at, at + chunk, dtype=torch.int32), torch.tensor([0, chunk], dtype=torch.int32), table
        )
        ops.write_latents(latents[rows], pages, batch)
        outputs.append(ops.latent_attention(q[rows], pages, batch, scale, v_dim))
        at += chunk
    return torch.cat(outputs)


def packed(ops: Operators, q: Tensor, latents: Tensor, lengths: list[int], scale: float, v_dim: int) -> Tensor:
    return ops.attention(q, latents[:, None], latents[:, None, :v_dim], Packed.of(lengths), scale)


@settings(max_examples=30, deadline=None)
@given(
    length=st.integers(1, 150), heads=st.sampled_from([1, 3, 8, 70]), dtype=DTYPES, count=THREADS,
    cuts=st.lists(st.integers(1, 149), max_size=5), fill=st.sampled_from([0.0, float("nan")]),
)  # fmt: skip
def test_chunks_and_decode_have_the_bits_of_the_packed_form(
    length: int, heads: int, dtype: torch.dtype, count: int, cuts: list[int], fill: float
) -> None:
    q, latents = randn(0, length, heads, 48, dtype=dtype), randn(1, length, 48, dtype=dtype)
    whole = packed(OPS, q, latents, [length], 0.2, 32)
    with threads(count):
        parts = paged(OPS, q, latents, chunked(length, cuts), 0.2, 32, fill)
    assert differing(parts, whole) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_shape_of_deepseek_v3(dtype: torch.dtype) -> None:
    """128 heads over latents of 512 + 64, decode and a short prefill, against float64."""
    q, latents = randn(0, 70, 128, 576, dtype=dtype), randn(1, 70, 576, dtype=dtype)
    ours = paged(OPS, q, latents, [68, 1, 1], 192**-0.5, 512)
    right = packed(operators("fast"), q.double(), latents.double(), [70], 192**-0.5, 512)
    # Scores of about 24 powers of two in float32, then one rounding of the output.
    tolerance = 2e-5 if dtype == torch.float32 else 1.2e-2
    assert (ours.double() - right).abs().max() <= tolerance * float(right.abs().max())
    assert differing(ours, packed(OPS, q, latents, [70], 192**-0.5, 512)) == 0


def test_no_gradient_is_lost_in_silence() -> None:
    pages = LatentPages.zeros(1, 48, torch.float32)
    batch = Paged(torch.zeros(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32), torch.zeros(1, 1).int())
    with pytest.raises(RuntimeError, match="has no gradient"):
        OPS.latent_attention(randn(0, 1, 2, 48).requires_grad_(), pages, batch, 0.2, 32)
