"""Every contract operator, forward and backward, against plain PyTorch in float64 on the same (rounded) inputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lockstep.ops import Operators, Packed, operators
from tests.ops.compare import randn

BATCH = Packed.of([130, 1, 69])
TOKENS = torch.arange(70) * 7 % 50
TARGETS = torch.arange(70) * 11 % 76 - 1  # -1 (ignored) to 74
TABLE = randn(9, 300, 16, 2)


def attention(window: int | None, softcap: float = 0.0) -> Callable[..., Tensor]:
    return lambda ops, q, k, v: ops.attention(q, k, v, BATCH, 0.3, window, softcap)


def cross_entropy(z_loss: float, softcap: float = 0.0) -> Callable[..., Tensor]:
    return lambda ops, x, w: ops.linear_cross_entropy(x, w, TARGETS, randn(8, 70).abs(), z_loss, softcap)[0]


CASES: dict[str, tuple[list[tuple[int, ...]], Callable[..., Tensor]]] = {
    "linear": ([(70, 96), (75, 96)], lambda ops, x, w: ops.linear(x, w)),
    "linear+bias": ([(7, 100), (33, 100), (33,)], lambda ops, x, w, b: ops.linear(x, w, b)),
    "linear deep": ([(5, 1000), (20, 1000)], lambda ops, x, w: ops.linear(x, w)),
    "linear tall": ([(300, 20), (300, 20)], lambda ops, x, w: ops.linear(x, w)),
    "rms_norm": ([(70, 96), (96,)], lambda ops, x, w: ops.rms_norm(x, w, 1e-5)),
    "rms_norm heads, offset": ([(9, 3, 20), (20,)], lambda ops, x, w: ops.rms_norm(x, w, 1e-6, 1.0)),
    "silu": ([(70, 33), (70, 33)], lambda ops, g, u: ops.gated(g, u, "silu")),
    "gelu": ([(70, 33), (70, 33)], lambda ops, g, u: ops.gated(g, u, "gelu_tanh")),
    "embedding": ([(50, 33)], lambda ops, w: ops.embedding(TOKENS, w, w.dtype, 2.0)),
    "copies for heads": ([(70, 33)], lambda ops, x: ops.share_heads(x, 5)),
    "rope": ([(200, 3, 32)], lambda ops, x: ops.rope(x, BATCH.positions, TABLE)),
    "attention": ([(200, 6, 32), (200, 2, 32), (200, 2, 32)], attention(None)),
    "attention one head": ([(200, 1, 16), (200, 1, 16), (200, 1, 16)], attention(None)),
    "attention many heads": ([(200, 8, 16), (200, 1, 16), (200, 1, 16)], attention(None)),
    "attention, narrow values": ([(200, 6, 48), (200, 2, 48), (200, 2, 16)], attention(None)),
    "attention, wide values": ([(200, 4, 16), (200, 1, 16), (200, 1, 48)], attention(40)),
    "attention window": ([(200, 6, 32), (200, 2, 32), (200, 2, 32)], attention(40)),
    "attention window 1": ([(200, 2, 16), (200, 2, 16), (200, 2, 16)], attention(1)),
    "attention soft cap": ([(200, 4, 32), (200, 2, 32), (200, 2, 16)], attention(40, 0.7)),
    "cross entropy": ([(70, 40), (75, 40)], cross_entropy(0.0)),
    "cross entropy, z-loss": ([(70, 40), (75, 40)], cross_entropy(0.01)),
    "cross entropy, soft cap": ([(70, 40), (75, 40)], cross_entropy(0.01, 5.0)),
}


def run(ops: Operators, case: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of a fixed random projection of it."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = case(ops, *leaves)
    (y.double() * randn(5, *y.shape).double()).sum().backward()
    return [y.detach(), *(x.grad for x in leaves)]  # type: ignore[misc]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str, dtype: torch.dtype) -> None:
    shapes, case = CASES[name]
    inputs = [randn(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
    ours = run(operators("bitwise"), case, inputs)
    oracle = run(operators("fast"), case, [x.double() for x in inputs])
    # One rounding of the result (2^-24 or 2^-9 relative), plus float32 sums and, in bfloat16, rounded
    # intermediate gradients: a few units of the largest element.
    tolerance = 3e-6 if dtype == torch.float32 else 1.6e-2
    for mine, right in zip(ours, oracle, strict=True):
        assert (mine.double() - right).abs().max() <= tolerance * max(1.0, float(right.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_an_embedding_gradient_are_chains_over_the_tokens_rounded_once(dtype: torch.dtype) -> None:
    weight, dy = randn(0, 53, 37, dtype=dtype).requires_grad_(), randn(1, 300, 37, dtype=torch.bfloat16)
    tokens = torch.arange(300) ** 2 % 53
    operators("bitwise").embedding(tokens, weight, torch.bfloat16).backward(dy)
    right = torch.zeros(53, 37)
    for token, row in zip(tokens.tolist(), dy.float(), strict=True):
        right[token] += row
    assert weight.grad is not None
    assert weight.grad.dtype == dtype
    assert torch.equal(weight.grad, right.to(dtype))


def test_a_wide_input_of_a_norm() -> None:
    """float32 in, bfloat16 out, and a float32 gradient back: the residual stream feeding a layer."""
    inputs = [randn(0, 33, 50), randn(1, 50, dtype=torch.bfloat16)]
    case = lambda ops, x, w: ops.rms_norm(x, w, 1e-5, out_dtype=torch.bfloat16)  # noqa: E731
    y, dx, dw = run(operators("bitwise"), case, inputs)
    right = run(operators("fast"), lambda ops, x, w: ops.rms_norm(x, w, 1e-5), [x.double() for x in inputs])
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    for mine, theirs in zip((y, dx, dw), right, strict=True):  # y, dy and dw are rounded to bfloat16
        assert (mine.double() - theirs).abs().max() <= 1e-2 * float(theirs.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_attention_agrees_with_float64(dtype: torch.dtype) -> None:
    from tests.ops.sequences import paged_outputs

    q, k, v = (randn(i, 150, heads, 32, dtype=dtype) for i, heads in enumerate([4, 2, 2]))
    ours = paged_outputs(operators("bitwise"), q, k, v, [100, 50], window=70)
    oracle = operators("fast").attention(q.double(), k.double(), v.double(), Packed.of([150]), 0.2, 70)
    tolerance = 3e-6 if dtype == torch.float32 else 1.2e-2  # one rounding of the output
    assert (ours.double() - oracle).abs().max() <= tolerance * float(oracle.abs().max())


def test_logprobs_of_the_loss_are_the_selected_ones() -> None:
    ops = operators("bitwise")
    x, w = randn(0, 70, 40), randn(1, 75, 40)
    logits = ops.linear(x, w, out_dtype=torch.float32)
    targets = TARGETS.clamp(min=0)
    chosen = ops.linear_cross_entropy(x, w, targets, torch.ones(70))[1]
    assert torch.equal(chosen, ops.select_logprobs(logits, targets))
    assert torch.equal(chosen, ops.log_softmax(logits)[torch.arange(70), targets])
    assert torch.allclose(chosen, torch.log_softmax(logits.double(), -1)[torch.arange(70), targets].float(), atol=2e-6)


def test_the_loss_does_not_depend_on_how_many_logits_are_held() -> None:
    """130,000 columns: 64 rows at a time, then 16; a chunk goes on where the one before it ended."""
    x, w = randn(0, 80, 16), randn(1, 130_000, 16)
    targets, weights = torch.arange(80) * 11, randn(2, 80).abs()

    def run(rows: slice, d_weight: bool) -> tuple[Tensor, ...]:
        arguments = (x[rows], w, targets[rows], weights[rows], 0.1, 0.0, True, True, d_weight)
        return torch.ops.lockstep.linear_cross_entropy(*arguments)  # type: ignore[no-any-return]

    _, logprobs, entropies, d_x, d_w, _ = run(slice(0, 80), True)
    for i in range(0, 80, 13):
        _, logprob, entropy, d, _, _ = run(slice(i, i + 1), False)
        assert torch.equal(logprobs[i : i + 1], logprob)
        assert torch.equal(entropies[i : i + 1], entropy)
        assert torch.equal(d_x[i : i + 1], d)
    logits = x.double() @ w.double().T
    kept = logits.softmax(-1) * (1 + 0.2 * torch.logsumexp(logits, -1, keepdim=True))
    kept[torch.arange(80), targets] -= 1
    right = (kept * weights[:, None]).T @ x.double()
    assert (d_w.double() - right).abs().max() < 3e-6 * float(right.abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_entropies(dtype: torch.dtype, softcap: float) -> None:
    x, w = randn(0, 70, 40, dtype=dtype), randn(1, 75, 40, dtype=dtype)
    weights = torch.ones(70)
    _, _, ours = operators("bitwise").linear_cross_entropy(x, w, TARGETS, weights, 0.0, softcap, entropy=True)
    oracle = operators("fast").linear_cross_entropy(
        x.double(), w.double(), TARGETS, weights, 0.0, softcap, entropy=True
    )[2]
    assert ours.dtype == torch.float32
    assert (ours.double() - oracle).abs().max() < 3e-6  # some thirty float32 roundings of values up to log 75


@pytest.mark.parametrize("scale", [1.0, 0.3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_incoming_gradient_of_the_loss(scale: float, dtype: torch.dtype) -> None:
    """1 is the identity, exactly; any other factor multiplies once, in float32; twice through the graph is the same."""
    x, w = randn(0, 70, 40, dtype=dtype).requires_grad_(), randn(1, 75, 40).requires_grad_()
    loss = operators("bitwise").linear_cross_entropy(x, w, TARGETS, torch.ones(70))[0]
    ones = torch.ops.lockstep.linear_cross_entropy(
        x.detach(), w.detach(), TARGETS, torch.ones(70), 0.0, 0.0, False, True, True
    )[3:5]
    for _ in range(2):
        d_x, d_w = torch.autograd.grad(loss, (x, w), torch.tensor(scale), retain_graph=True)
        assert torch.equal(d_x, (ones[0].float() * scale).to(dtype))
        assert torch.equal(d_w, ones[1] * scale)


def test_no_gradient_is_lost_in_silence() -> None:
    ops = operators("bitwise")
    x = randn(0, 5, 16).requires_grad_()
    for call in (
        lambda: ops.linear(x, ops.pack(randn(1, 16, 16), torch.float32)),
        lambda: ops.log_softmax(x),
        lambda: ops.select_logprobs(x, torch.zeros(5, dtype=torch.int64)),
    ):
        with pytest.raises(RuntimeError, match="has no gradient"):
            call()
        with torch.no_grad():
            call()
