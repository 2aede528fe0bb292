"""The vocabulary in segments: the definition written out, the same bytes on any number of devices, and float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.ops import Operators, head_parts, operators
from lockstep.ops.cut_vocabulary import cut_vocabulary
from lockstep.ops.head_parts import Segments
from lockstep.ops.linear import input_gradient
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from tests.ops.compare import differing, randn
from tests.ranks_as_threads import on_threads

OPS = operators("bitwise")
RAW = torch.ops.lockstep
ROWS, WIDTH = 70, 40
TARGETS = torch.arange(ROWS) * 31 % 78 - 1
"""Of 77 tokens; some rows have none."""


def inputs(dtype: torch.dtype, vocabulary: int = 77) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight (float32 masters), token weights"""
    return randn(0, ROWS, WIDTH, dtype=dtype), randn(1, vocabulary, WIDTH), randn(2, ROWS).abs()


def results(ops: Operators, hidden: Tensor, weight: Tensor, factors: Tensor, **asked: Any) -> list[Tensor]:
    """loss, log-probabilities, entropies, and the gradients of hidden and weight"""
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    found = ops.linear_cross_entropy(x, w, TARGETS, factors, entropy=True, **asked)
    found[0].backward()
    return [*(t.detach() for t in found), x.grad, w.grad]  # type: ignore[list-item]


def on_devices(count: int, segments: int, vocabulary: int, work: Callable[[Operators, Segments], Any]) -> list[Any]:
    def of(mesh: Mesh) -> Any:
        axis = mesh["tp"]
        own = Segments(vocabulary, segments, segments // count, axis.index)
        return work(cut_vocabulary(OPS, own, axis.add, axis.gather), own)

    return on_threads(MeshShape(tp=count), of)


@pytest.mark.parametrize(("vocabulary", "segments"), [(77, 1), (77, 4), (80, 8), (8, 8), (9, 4)])
def test_devices_hold_neighbouring_segments_as_tensor_split_cuts_them(vocabulary: int, segments: int) -> None:
    whole = torch.arange(vocabulary)
    for devices in (n for n in (1, 2, 4, 8) if n <= segments):
        held = [Segments(vocabulary, segments, segments // devices, i) for i in range(devices)]
        parts = [whole[one.first : one.first + one.held] for one in held]
        assert torch.equal(torch.cat(parts), whole)
        cut = [segment for part, one in zip(parts, held, strict=True) for segment in part.tensor_split(one.here)]
        assert all(torch.equal(a, b) for a, b in zip(cut, whole.tensor_split(segments), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_definition_written_out(dtype: torch.dtype) -> None:
    hidden, weight, factors = inputs(dtype)
    cut = cut_vocabulary(OPS, Segments(77, 4, 4))
    loss, logprobs, entropies, dx, dw = results(cut, hidden, weight, factors)
    logits = OPS.linear(hidden, weight, out_dtype=torch.float32)
    parts = [RAW.log_sum_exp(part.contiguous(), 1) for part in logits.tensor_split(4, dim=1)]
    log_z = RAW.log_sum_exp(torch.cat(parts, 1), 1)[:, 0]
    assert differing(cut.log_softmax(logits), logits - log_z[:, None]) == 0
    targets = TARGETS.clamp(min=0)
    assert differing(logprobs, (logits - log_z[:, None])[torch.arange(ROWS), targets]) == 0
    assert differing(cut.select_logprobs(logits, targets), logprobs) == 0
    e = [RAW.entropies(part.contiguous(), log_z, 1)[:, 0] for part in logits.tensor_split(4, dim=1)]
    assert differing(entropies, (e[0] + e[1]) + (e[2] + e[3])) == 0
    assert differing(loss, RAW.column_sums(torch.where(TARGETS < 0, 0.0, -logprobs * factors)[:, None])[0]) == 0
    d = RAW.cross_entropy_backward(logits, log_z, TARGETS, factors, 0.0, 0.0, 0, dtype)
    pairs = zip(d.tensor_split(4, 1), weight.tensor_split(4), strict=True)
    g = [input_gradient(rows.contiguous(), part, torch.float32) for rows, part in pairs]
    assert differing(dx, ((g[0] + g[1]) + (g[2] + g[3])).to(dtype)) == 0
    assert differing(dw, RAW.gemm_transposed(d, RAW.pack_rows(hidden, dtype), WIDTH)) == 0


def test_one_segment_is_the_operators_own() -> None:
    assert cut_vocabulary(OPS, Segments(77, 1, 1)) is OPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("asked", [{}, {"z_loss": 0.1}, {"z_loss": 0.1, "softcap": 5.0}], ids=str)
@pytest.mark.parametrize("chunk", [None, 16])
def test_any_number_of_devices_gives_the_same_bytes(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, asked: dict[str, float], chunk: int | None
) -> None:
    """Also a chunk of the rows at a time; 77 tokens are no multiple of anything."""
    hidden, weight, factors = inputs(dtype)
    expected = results(cut_vocabulary(OPS, Segments(77, 4, 4)), hidden, weight, factors, **asked)
    if chunk is not None:
        monkeypatch.setattr(head_parts, "HELD", chunk)
    for devices in (1, 2, 4):
        found = on_devices(
            devices, 4, 77,
            lambda ops, own: results(ops, hidden, weight[own.first : own.first + own.held], factors, **asked),
        )  # fmt: skip
        for one in found:
            assert [differing(a, b) for a, b in zip(one[:4], expected[:4], strict=True)] == [0] * 4
        assert differing(torch.cat([one[4] for one in found]), expected[4]) == 0


@pytest.mark.parametrize("numerics", ["bitwise", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_agrees_with_float64(numerics: Any, dtype: torch.dtype) -> None:
    hidden, weight, factors = inputs(dtype)
    weight = weight.to(dtype).float()
    asked = {"z_loss": 0.1, "softcap": 5.0}
    ours = results(cut_vocabulary(operators(numerics), Segments(77, 4, 4)), hidden, weight, factors, **asked)
    right = results(operators("fast"), hidden.double(), weight.double(), factors, **asked)
    # One rounding of the result, plus float32 sums and, in bfloat16, rounded gradients of the logits.
    tolerance = 3e-6 if dtype == torch.float32 else 1.6e-2
    for mine, theirs in zip(ours, right, strict=True):
        assert (mine.double() - theirs).abs().max() <= tolerance * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1.7])
def test_a_token_has_its_row_of_the_embedding_bit_for_bit(dtype: torch.dtype, scale: float) -> None:
    """Zeros of both signs included; backward each device has the rows of its own tokens."""
    weight, tokens, dy = randn(0, 77, 24), torch.arange(50) ** 2 % 77, randn(1, 50, 24, dtype=dtype)
    weight[::3, ::2], weight[1::3, 1::2] = -0.0, 0.0
    whole = weight.clone().requires_grad_()
    y = OPS.embedding(tokens, whole, dtype, scale)
    y.backward(dy)

    def work(ops: Operators, own: Segments) -> tuple[Tensor, Tensor]:
        part = weight[own.first : own.first + own.held].clone().requires_grad_()
        rows = ops.embedding(tokens, part, dtype, scale)
        rows.backward(dy)
        assert part.grad is not None
        return rows.detach(), part.grad

    found = on_devices(4, 4, 77, work)
    assert all(differing(rows, y.detach()) == 0 for rows, _ in found)
    assert whole.grad is not None
    assert differing(torch.cat([grad for _, grad in found]), whole.grad) == 0


def test_an_incoming_gradient_multiplies_once() -> None:
    hidden, weight, factors = inputs(torch.bfloat16)
    ops = cut_vocabulary(OPS, Segments(77, 4, 4))
    ones = results(ops, hidden, weight, factors)[3:]
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = ops.linear_cross_entropy(x, w, TARGETS, factors)[0]
    d_x, d_w = torch.autograd.grad(loss, (x, w), torch.tensor(0.3))
    assert torch.equal(d_x, (ones[0].float() * 0.3).to(torch.bfloat16))
    assert torch.equal(d_w, ones[1] * 0.3)


def test_a_token_that_no_device_has_is_told() -> None:
    hidden, weight, factors = inputs(torch.float32)
    own = Segments(77, 4, 2, 1)
    ops = cut_vocabulary(OPS, own)
    with pytest.raises(RuntimeError, match="token 77 is not in the vocabulary of 77"):
        ops.linear_cross_entropy(hidden, weight[own.first :], TARGETS.clamp(min=77), factors)
    with pytest.raises(RuntimeError, match="token 77 is not in the vocabulary of 77"):
        ops.embedding(torch.tensor([77]), weight[own.first :], torch.float32)


def test_no_gradient_is_lost_in_silence() -> None:
    ops, x = cut_vocabulary(OPS, Segments(77, 4, 4)), randn(0, 3, 77).requires_grad_()
    for run in (lambda: ops.log_softmax(x), lambda: ops.select_logprobs(x, TARGETS[:3])):
        with pytest.raises(RuntimeError, match="has no gradient"):
            run()
