"""The hazards of rescaling by an integer addition to the exponent (AMLA), each against softmax in float64.

Two blocks of 64 keys: a row of the second one has been through the first, so its sums there are rescaled.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.ops import LatentPages, Packed, Paged, operators
from tests.ops.compare import randn

OPS = operators("bitwise")
T, D = 128, 16


def attention(scores: Tensor, v: Tensor) -> Tensor:
    """Causal attention of one head whose score of key j is scores[j] (times ln 2, so to base 2) for every query."""
    q = torch.zeros(len(scores), 1, D)
    q[..., 0] = 1.0
    k = torch.zeros(len(scores), 1, D)
    k[:, 0, 0] = scores
    return OPS.attention(q, k, v[:, None], Packed.of([len(scores)]), 0.693147180559945)[:, 0]


def latent_attention(scores: Tensor, v: Tensor) -> Tensor:
    """The same over pages of latents: v, then the score, which q picks out."""
    latents = torch.zeros(len(scores), 2 * D)
    latents[:, :D], latents[:, D] = v, scores
    q = torch.zeros(len(scores), 1, 2 * D)
    q[..., D] = 1.0
    pages, table = LatentPages.zeros(2, 2 * D, torch.float32), torch.arange(2, dtype=torch.int32)[None]
    batch = Paged(torch.arange(T, dtype=torch.int32)[: len(q)], torch.tensor([0, len(q)], dtype=torch.int32), table)
    OPS.write_latents(latents, pages, batch)
    return OPS.latent_attention(q, pages, batch, 0.693147180559945, D)[:, 0]


KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"attention": attention, "latent": latent_attention}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor], Tensor]:
    return KERNELS[request.param]


def last_row(scores: Tensor, v: Tensor) -> Tensor:
    """The last query's output in float64: it sees every key."""
    p = torch.softmax(scores.double() * 0.693147180559945309417, dim=0)
    return (p[:, None] * v.double()).sum(0)


def second_block_is_higher_by(powers: float) -> Tensor:
    scores = randn(0, T)
    scores[64:] += powers
    return scores


@pytest.mark.parametrize("powers", [0.0, 0.4, 1.0, 3.5, 20.0, 127.0])
def test_ordinary_values(kernel: Callable[[Tensor, Tensor], Tensor], powers: float) -> None:
    scores, v = second_block_is_higher_by(powers), randn(1, T, D)
    # float32 sums over 128 keys, and scores of up to 2^7 in float32: 2^-17 relative in the exponent.
    torch.testing.assert_close(kernel(scores, v)[-1].double(), last_row(scores, v), rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_sum_that_is_zero_stays_zero(kernel: Callable[[Tensor, Tensor], Tensor], zero: float) -> None:
    """Added to a zero's bits, -20 in the exponent would borrow from the sign and give -1e32."""
    v = torch.full((T, D), zero)
    out = kernel(second_block_is_higher_by(20.0), v)
    assert (out == 0.0).all()
    v[64:] = randn(1, 64, D)
    scores = second_block_is_higher_by(20.0)
    torch.testing.assert_close(kernel(scores, v)[-1].double(), last_row(scores, v), rtol=3e-5, atol=1e-6)


@pytest.mark.parametrize("tiny", [1e-30, -1e-36, 1.2e-38])
def test_an_exponent_that_leaves_the_range_gives_zero(kernel: Callable[[Tensor, Tensor], Tensor], tiny: float) -> None:
    """The first block's sum is about 1e-30; 2^-100 of it is below the smallest number: 0, not a huge one."""
    v = torch.full((T, D), tiny)
    v[64:] = 0.0
    out = kernel(second_block_is_higher_by(100.0), v)
    assert (out[:64] != 0.0).any()
    assert (out[64:] == 0.0).all()


def test_subnormal_sums(kernel: Callable[[Tensor, Tensor], Tensor]) -> None:
    """A subnormal sum has no exponent to take from: it becomes 0; where nothing is rescaled it stays what it is."""
    v = torch.full((T, D), 1e-40)
    assert (kernel(torch.zeros(T), v) > 0.0).all()
    v[64:] = 0.0
    assert (kernel(second_block_is_higher_by(3.0), v)[-1] == 0.0).all()
    v[64:] = 1.0
    scores = second_block_is_higher_by(3.0)
    torch.testing.assert_close(kernel(scores, v)[-1].double(), last_row(scores, v), rtol=3e-6, atol=0.0)


def test_a_first_block_without_weight(kernel: Callable[[Tensor, Tensor], Tensor]) -> None:
    """All scores of the first block are -inf: its rows have no softmax, those of the second see the second alone."""
    scores, v = randn(0, T), randn(1, T, D)
    scores[:64] = -torch.inf
    out = kernel(scores, v)
    assert out[:64].isnan().all()
    torch.testing.assert_close(out[-1].double(), last_row(scores, v), rtol=3e-5, atol=1e-6)


def test_a_first_block_behind_the_window() -> None:
    """Rows 64 .. 127 with a window of 1 share their group with rows that see nothing of the first block."""
    q, k, v = (randn(i, T, 1, D) for i in range(3))
    out = OPS.attention(q, k, v, Packed.of([T]), 0.2, 1)
    torch.testing.assert_close(out, v, rtol=2.4e-7, atol=0.0)  # p v / p: two roundings


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("at", [3, 70])
def test_what_has_no_softmax_is_not_hidden(kernel: Callable[[Tensor, Tensor], Tensor], wrong: float, at: int) -> None:
    scores, v = second_block_is_higher_by(9.0), randn(1, T, D)
    scores[at] = wrong
    out = kernel(scores, v)
    assert not out[:at].isnan().any()
    assert out[at:].isnan().all()


@pytest.mark.parametrize("large", [1e4, 1e20, 1e38])
def test_very_large_maxima(kernel: Callable[[Tensor, Tensor], Tensor], large: float) -> None:
    """One key far above the others, in the second block: the rows that see it give its value."""
    scores, v = randn(0, T), randn(1, T, D)
    scores[80] = large
    out = kernel(scores, v)
    torch.testing.assert_close(out[80:], v[80].expand(T - 80, D), rtol=2.4e-7, atol=0.0)  # p v / p: two roundings
    torch.testing.assert_close(out[79].double(), last_row(scores[:80], v[:80]), rtol=3e-5, atol=1e-6)


def test_very_low_maxima(kernel: Callable[[Tensor, Tensor], Tensor]) -> None:
    scores, v = randn(0, T) - 1e5, randn(1, T, D)
    # Scores around -1e5 have 2^-8 as their last place.
    torch.testing.assert_close(kernel(scores, v)[-1].double(), last_row(scores, v), rtol=1e-2, atol=1e-2)
