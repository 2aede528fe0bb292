"""The kernels over pages in eight bits, against the same in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lockstep.ops import Int8Pages, Paged, fast_paged, int8_pages, plain
from tests.ops.compare import differing, randn
from tests.threads import threads


def empty_pages(count: int, heads: int, dim: int, v_dim: int) -> Int8Pages:
    """Pages full of what must never be read: the largest steps, and scales that are not numbers."""
    pages = Int8Pages.zeros(count, heads, dim, v_dim)
    for x, value in ((pages.k, 127), (pages.v, -128), (pages.k_scale, torch.nan), (pages.v_scale, torch.nan)):
        x.fill_(value)
    return pages


def chunk(first: int, count: int, table: Tensor) -> Paged:
    """The tokens first .. first + count - 1 of one sequence."""
    positions = torch.arange(first, first + count, dtype=torch.int32)
    return Paged(positions, torch.tensor([0, count], dtype=torch.int32), table)


@given(
    length=st.integers(1, 150), heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (8, 1)]),
    dims=st.sampled_from([(16, 16), (64, 64), (48, 16)]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    window=st.sampled_from([None, 1, 70]), softcap=st.sampled_from([0.0, 5.0]), cut=st.integers(1, 150),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_both_ways_to_write_and_to_read_agree(
    length: int, heads: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, window: int | None, softcap: float,
    cut: int, seed: int,
) -> None:  # fmt: skip
    (per, kv), (dim, v_dim), cut = heads, dims, min(cut, length)
    q = randn(seed, length, per * kv, dim, dtype=dtype)
    k, v = randn(seed + 1, length, kv, dim, dtype=dtype) * 3, randn(seed + 2, length, kv, v_dim, dtype=dtype)
    k[0], v[-1] = 0.0, 0.0  # a scale of zero
    table = torch.randperm(4, generator=torch.Generator().manual_seed(seed))[:3].to(torch.int32)[None]
    ours, theirs = (empty_pages(4, kv, dim, v_dim) for _ in range(2))
    for first, rows in ((0, slice(0, cut)), (cut, slice(cut, length))):
        batch = chunk(first, len(q[rows]), table)
        fast_paged.write_kv(k[rows], v[rows], ours, batch)
        plain.write_kv(k[rows], v[rows], theirs, batch)
        for name in ("k", "v", "k_scale", "v_scale"):
            assert differing(getattr(ours, name), getattr(theirs, name)) == 0, name
        if first == length:
            break
        mine = fast_paged.paged_attention(q[rows], ours, batch, 0.2, window, softcap)
        right = plain.paged_attention(q[rows].double(), theirs, batch, 0.2, window, softcap)
        # float32 sums, and one rounding of the output
        tolerance = 3e-6 if dtype == torch.float32 else 1.2e-2
        assert (mine.double() - right).abs().max() <= tolerance * max(1.0, float(right.abs().max()))


def test_a_row_does_not_depend_on_its_batch_nor_on_threads() -> None:
    lengths, heads, dim = [200, 65, 1], 2, 32
    pages = empty_pages(8, heads, dim, dim)
    table = torch.tensor([[5, 0, 7, 2], [1, 3, 0, 0], [6, 0, 0, 0]], dtype=torch.int32)
    ends = torch.tensor(lengths, dtype=torch.int32)
    for s, n in enumerate(lengths):
        k, v = randn(s, n, heads, dim), randn(s + 9, n, heads, dim)
        int8_pages.write_kv(k, v, pages, chunk(0, n, table[s : s + 1]))
    q = randn(3, 3, 6, dim)
    batch = Paged(ends - 1, torch.arange(4, dtype=torch.int32), table)
    together = int8_pages.paged_attention(q, pages, batch, 0.2, 0, 0.0)
    for count in (1, 2, 4):
        with threads(count):
            for s, n in enumerate(lengths):
                alone = int8_pages.paged_attention(q[s : s + 1], pages, chunk(n - 1, 1, table[s : s + 1]), 0.2, 0, 0.0)
                assert differing(alone, together[s : s + 1]) == 0


def test_without_a_compiler_pytorch_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_pages, "has_kernels", lambda: False)
    monkeypatch.setattr(int8_pages, "paged_attention", None)
    pages, table = empty_pages(1, 1, 16, 16), torch.zeros(1, 1, dtype=torch.int32)
    q, k, v = (randn(i, 9, 1, 16) for i in range(3))
    fast_paged.write_kv(k, v, pages, chunk(0, 9, table))
    out = fast_paged.paged_attention(q, pages, chunk(0, 9, table), 0.2)
    assert (out - plain.attend(q, k, v, 0, 0.2, None, 0.0)).abs().max() < 0.05  # eight bits
