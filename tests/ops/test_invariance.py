"""The bit contract, operator by operator: a row's bytes depend on nothing but the row's own inputs (C1, C2)."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.ops import Packed, operators
from lockstep.ops.linear import input_gradient, rows_together, weight_gradient
from tests.ops.compare import differing, randn
from tests.ops.sequences import paged_outputs
from tests.threads import threads

OPS = operators("bitwise")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
THREADS = st.sampled_from([1, 2, 4])
PROPERTY = settings(max_examples=40, deadline=None)


@PROPERTY
@given(
    rows=st.integers(1, 230), n=st.integers(1, 300), k=st.integers(1, 900), at=st.integers(0, 229), dtype=DTYPES,
    count=THREADS, packed=st.booleans(),
)  # fmt: skip
def test_linear_row(rows: int, n: int, k: int, at: int, dtype: torch.dtype, count: int, packed: bool) -> None:
    at %= rows
    x, weight, bias = randn(0, rows, k, dtype=dtype), randn(1, n, k), randn(2, n)
    alone = OPS.linear(x[at : at + 1], weight, bias)
    with threads(count):
        batch = OPS.linear(x, OPS.pack(weight, dtype) if packed else weight, bias)
    assert differing(batch[at : at + 1], alone) == 0


@PROPERTY
@given(rows=st.integers(1, 300), n=st.integers(1, 120), k=st.integers(1, 120), cut=st.integers(0, 300), dtype=DTYPES)
def test_weight_gradient_continues(rows: int, n: int, k: int, cut: int, dtype: torch.dtype) -> None:
    """Two runs of rows, the second going on from the first, give the bits of one run; so do all thread counts. Where
    rows go by pairs or tiles, a run ends with one."""
    cut %= rows
    cut -= cut % rows_together(dtype)
    dy, x = randn(0, rows, n, dtype=dtype), randn(1, rows, k, dtype=dtype)
    with threads(1):
        whole = weight_gradient(dy, x)
    first = weight_gradient(dy[:cut], x[:cut]) if cut else torch.zeros(n, k)
    assert differing(weight_gradient(dy[cut:], x[cut:], out=first), whole) == 0


@PROPERTY
@given(rows=st.integers(1, 200), n=st.integers(1, 500), k=st.integers(1, 90), at=st.integers(0, 199), dtype=DTYPES)
def test_input_gradient_row(rows: int, n: int, k: int, at: int, dtype: torch.dtype) -> None:
    at %= rows
    dy, weight = randn(0, rows, n, dtype=dtype), randn(1, n, k)
    assert differing(input_gradient(dy, weight)[at : at + 1], input_gradient(dy[at : at + 1], weight)) == 0


ROWWISE: dict[str, Callable[[Tensor], Tensor]] = {
    "rms_norm": lambda x: OPS.rms_norm(x, randn(1, x.shape[-1]), 1e-5),
    "gated": lambda x: OPS.gated(x, x.flip(-1), "silu"),
    "gelu": lambda x: OPS.gated(x, x.flip(-1), "gelu_tanh"),
    "log_softmax": lambda x: OPS.log_softmax(x.float()),
    "select": lambda x: OPS.select_logprobs(x.float(), torch.zeros(len(x), dtype=torch.int64)),
}


@pytest.mark.parametrize("name", ROWWISE)
@PROPERTY
@given(rows=st.integers(1, 60), d=st.integers(1, 200), at=st.integers(0, 59), dtype=DTYPES, count=THREADS)
def test_rowwise(name: str, rows: int, d: int, at: int, dtype: torch.dtype, count: int) -> None:
    at %= rows
    x = randn(0, rows, d, dtype=dtype)
    alone = ROWWISE[name](x[at : at + 1])
    with threads(count):
        assert differing(ROWWISE[name](x)[at : at + 1], alone) == 0


def chunked(total: int, cuts: list[int]) -> list[int]:
    marks = sorted({c % total for c in cuts} - {0})
    ends = [*marks, total]
    return [b - a for a, b in zip([0, *marks], ends, strict=True)]


@PROPERTY
@given(
    lengths=st.lists(st.integers(1, 160), min_size=1, max_size=4),
    which=st.integers(0, 3),
    dtype=DTYPES,
    count=THREADS,
    window=st.sampled_from([None, 1, 5, 64, 100]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2), (8, 1)]),
    cuts=st.lists(st.integers(1, 159), max_size=6),
    fill=st.sampled_from([0.0, float("nan")]),
    softcap=st.sampled_from([0.0, 0.5]),
)  # fmt: skip
def test_attention_paths(
    lengths: list[int], which: int, dtype: torch.dtype, count: int, window: int | None, heads: tuple[int, int],
    cuts: list[int], fill: float, softcap: float,
) -> None:  # fmt: skip
    """A sequence in a packed batch, alone, in prefill chunks over stale pages: the same bytes."""
    which %= len(lengths)
    total, n = sum(lengths), lengths[which]
    q = randn(0, total, heads[0], 32, dtype=dtype)
    k, v = randn(1, total, heads[1], 32, dtype=dtype), randn(2, total, heads[1], 32, dtype=dtype)
    with threads(count):
        batch = OPS.attention(q, k, v, Packed.of(lengths), 0.2, window, softcap)
    start = sum(lengths[:which])
    rows = slice(start, start + n)
    alone = OPS.attention(q[rows], k[rows], v[rows], Packed.of([n]), 0.2, window, softcap)
    assert differing(batch[rows], alone) == 0
    paged = paged_outputs(OPS, q[rows], k[rows], v[rows], chunked(n, cuts), window, fill, softcap)
    assert differing(paged, alone) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_one_by_one(dtype: torch.dtype) -> None:
    q, k, v = (randn(i, 140, heads, 64, dtype=dtype) for i, heads in enumerate([9, 3, 3]))
    whole = OPS.attention(q, k, v, Packed.of([140]), 0.2)
    assert differing(paged_outputs(OPS, q, k, v, [1] * 140), whole) == 0


@PROPERTY
@given(lengths=st.lists(st.integers(1, 90), min_size=1, max_size=3), dtype=DTYPES, count=THREADS)
def test_gradients_do_not_depend_on_threads(lengths: list[int], dtype: torch.dtype, count: int) -> None:
    total = sum(lengths)
    inputs = [randn(i, total, heads, 16, dtype=dtype) for i, heads in enumerate([4, 2, 2])]

    def gradients() -> list[Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        OPS.attention(q, k, v, Packed.of(lengths), 0.2, 50).square().sum().backward()
        x, w = inputs[0].flatten(1).clone().requires_grad_(), randn(7, 40, 64).requires_grad_()
        targets = torch.arange(total) % 40
        OPS.linear_cross_entropy(OPS.rms_norm(x, randn(8, 64), 1e-5), w, targets, torch.ones(total))[0].backward()
        return [t.grad for t in (q, k, v, x, w) if t.grad is not None]

    with threads(1):
        one = gradients()
    with threads(count):
        many = gradients()
    assert [differing(a, b) for a, b in zip(one, many, strict=True)] == [0] * 5


def test_a_later_token_cannot_reach_back() -> None:
    """Not even a NaN: masked keys are skipped, not multiplied by zero."""
    q, k, v = (randn(i, 80, heads, 16) for i, heads in enumerate([2, 1, 1]))
    clean = OPS.attention(q, k, v, Packed.of([80]), 0.2)
    k[70:], v[70:] = float("nan"), float("inf")
    assert differing(OPS.attention(q, k, v, Packed.of([80]), 0.2)[:70], clean[:70]) == 0


def test_not_a_number_is_not_hidden() -> None:
    q, k, v = (randn(i, 80, heads, 16) for i, heads in enumerate([2, 1, 1]))
    k[3, 0, 0] = float("nan")
    out = OPS.attention(q, k, v, Packed.of([80]), 0.2)
    assert not out[:3].isnan().any()
    assert out[3:].isnan().all()


def test_very_large_scores_and_far_apart() -> None:
    q = torch.full((70, 1, 16), 300.0)
    k = torch.linspace(-1, 1, 70)[:, None, None].expand(70, 1, 16).contiguous() * 300.0
    v = randn(2, 70, 1, 16)
    out = OPS.attention(q, k, v, Packed.of([70]), 1.0)
    # Every query sees one key far above the others, its own: p v / p, two roundings.
    torch.testing.assert_close(out, v, rtol=2.4e-7, atol=0.0)
