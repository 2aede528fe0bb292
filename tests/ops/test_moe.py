"""Mixture of experts, operator by operator: against float64, and the bits of a token whatever shares its experts."""

from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.ops import Operators, Routing, operators
from tests.ops.compare import differing, randn
from tests.ops.test_invariance import threads

OPS, PLAIN = operators("bitwise"), operators("fast")
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
THREADS = st.sampled_from([1, 2, 4])
PROPERTY = settings(max_examples=25, deadline=None)

ROUTINGS = {
    "mixtral": Routing(2),
    "qwen3": Routing(3, normalize=False),
    "one": Routing(1),
    "all": Routing(12),
    "deepseek v3": Routing(3, "sigmoid", groups=4, top_groups=2, scale=2.5),
    "deepseek v3, not normalised": Routing(4, "sigmoid", normalize=False, groups=3, top_groups=1),
    "deepseek v2": Routing(3, normalize=False, groups=4, top_groups=2, pairs=False, scale=16.0),
}
E = 12


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("biased", [False, True])
def test_router_agrees_with_float64(name: str, biased: bool) -> None:
    routing, logits = ROUTINGS[name], randn(1, 200, E)
    bias = randn(2, E) if biased and routing.scoring == "sigmoid" else None
    ours, right = OPS.route(logits, routing, bias), PLAIN.route(logits.double(), routing, bias)
    for field in ("chosen", "offsets", "rows", "slots"):
        assert torch.equal(getattr(ours, field), getattr(right, field)), field
    # A few float32 roundings in exp, sum and quotient.
    torch.testing.assert_close(ours.weights.double(), right.weights, rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("name", ROUTINGS)
def test_router_gradient_agrees_with_float64(name: str) -> None:
    def gradient(ops: Operators, logits: Tensor) -> Tensor:
        logits = logits.clone().requires_grad_()
        weights = ops.route(logits, ROUTINGS[name], randn(3, E)).weights
        (weights * randn(4, *weights.shape).to(weights.dtype)).sum().backward()
        assert logits.grad is not None
        return logits.grad

    logits = randn(1, 90, E)
    ours, right = gradient(OPS, logits), gradient(PLAIN, logits.double())
    # float32 roundings, and the cancellation in dw - sum(dw p): a unit of the largest element.
    assert (ours.double() - right).abs().max() <= 1e-6 * max(1.0, float(right.abs().max()))


def test_of_equal_scores_the_lowest_expert_is_chosen() -> None:
    logits = torch.zeros(3, 8)
    assert OPS.route(logits, Routing(3)).chosen.tolist() == [[0, 1, 2]] * 3
    grouped = Routing(2, "sigmoid", groups=4, top_groups=2)
    assert OPS.route(logits, grouped).chosen.tolist() == [[0, 1]] * 3
    assert OPS.route(logits, grouped, torch.tensor([0, 0, 0, 0, 0, 0, 1.0, 0])).chosen.tolist() == [[0, 6]] * 3


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_nan_is_not_hidden_and_reaches_its_own_token_alone(name: str) -> None:
    routing, logits = ROUTINGS[name], randn(1, 5, E)
    clean = OPS.route(logits, routing)
    logits[2, 7] = float("nan")
    routes = OPS.route(logits, routing)
    assert routes.weights[2].isnan().any()
    assert (routes.chosen >= 0).all()
    assert (routes.chosen < E).all()
    for row in (0, 1, 3, 4):
        assert differing(routes.weights[row], clean.weights[row]) == 0


@PROPERTY
@given(tokens=st.integers(1, 80), seed=st.integers(0, 9), name=st.sampled_from(list(ROUTINGS)))
def test_groups_are_a_stable_counting_sort(tokens: int, seed: int, name: str) -> None:
    routes = OPS.route(randn(seed, tokens, E), ROUTINGS[name])
    k = routes.chosen.shape[1]
    pairs = [(expert, token, j) for token, row in enumerate(routes.chosen.tolist()) for j, expert in enumerate(row)]
    pairs.sort()
    assert routes.rows.tolist() == [token for _, token, _ in pairs]
    assert routes.offsets.tolist() == [sum(e < expert for e, _, _ in pairs) for expert in range(E + 1)]
    assert [routes.slots[token, j].item() for _, token, j in pairs] == list(range(tokens * k))


def layer(ops: Operators, x: Tensor, logits: Tensor, weights: list[Tensor], routing: Routing) -> Tensor:
    routes = ops.route(logits, routing)
    return ops.combine(ops.grouped_linear(ops.dispatch(x, routes), weights, routes.offsets), routes)


@PROPERTY
@given(
    tokens=st.integers(1, 120), at=st.integers(0, 119), n=st.integers(1, 70), k=st.integers(1, 90), dtype=DTYPES,
    count=THREADS, packed=st.booleans(), name=st.sampled_from(list(ROUTINGS)),
)  # fmt: skip
def test_a_token_does_not_depend_on_what_shares_its_experts(
    tokens: int, at: int, n: int, k: int, dtype: torch.dtype, count: int, packed: bool, name: str
) -> None:
    at %= tokens
    x, logits = randn(0, tokens, k, dtype=dtype), randn(1, tokens, E)
    weights = [randn(10 + e, n, k) for e in range(E)]
    alone = layer(OPS, x[at : at + 1], logits[at : at + 1], weights, ROUTINGS[name])
    used = [OPS.pack(weight, dtype) for weight in weights] if packed else weights
    with threads(count):
        together = layer(OPS, x, logits, used, ROUTINGS[name])
    assert differing(together[at : at + 1], alone) == 0


def test_a_grouped_product_has_the_bits_of_linear() -> None:
    x, weights = randn(0, 60, 75, dtype=torch.bfloat16), [randn(e, 33, 75) for e in range(4)]
    offsets = torch.tensor([0, 17, 17, 18, 60], dtype=torch.int32)
    y = OPS.grouped_linear(x, weights, offsets)
    for weight, (a, b) in zip(weights, pairwise(offsets.tolist()), strict=True):
        assert differing(y[a:b], OPS.linear(x[a:b], weight)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_grouped_gated_product_has_the_bytes_of_its_parts(dtype: torch.dtype, activation: str) -> None:
    offsets = torch.tensor([0, 17, 17, 18, 140], dtype=torch.int32)
    masters = [randn(0, 140, 75, dtype=dtype), *(randn(1 + e, 33, 75) for e in range(8))]

    def run(call: Callable[..., Tensor]) -> list[Tensor]:
        x, *weights = (w.clone().requires_grad_() for w in masters)
        y = call(x, weights[:4], weights[4:])
        (y * randn(9, *y.shape).to(dtype)).sum().backward()
        return [y.detach(), *(leaf.grad for leaf in (x, *weights) if leaf.grad is not None)]

    def parts(x: Tensor, gates: list[Tensor], ups: list[Tensor]) -> Tensor:
        return OPS.gated(OPS.grouped_linear(x, gates, offsets), OPS.grouped_linear(x, ups, offsets), activation)

    right = run(parts)
    assert len(right) == 10
    for count in (1, 2):
        with threads(count):
            fused = run(lambda x, gates, ups: OPS.grouped_gated(x, gates, ups, offsets, activation))
        assert [differing(a, b) for a, b in zip(fused, right, strict=True)] == [0] * 10
    packed = [OPS.pack(weight, dtype) for weight in masters[1:]]
    y = OPS.grouped_gated(masters[0], packed[:4], packed[4:], offsets, activation)
    assert differing(y, right[0]) == 0


def gradients(ops: Operators, dtype: torch.dtype, routing: Routing) -> list[Tensor]:
    inputs = [randn(0, 70, 40, dtype=dtype), randn(1, 70, E), *(randn(10 + e, 24, 40, dtype=dtype) for e in range(E))]
    leaves = [(x.double() if ops is PLAIN else x).requires_grad_() for x in inputs]
    y = layer(ops, leaves[0], leaves[1], leaves[2:], routing)
    (y.double() * randn(5, *y.shape).double()).sum().backward()
    return [y.detach(), *(x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["mixtral", "qwen3", "one", "deepseek v3"])
def test_gradients_agree_with_float64(name: str, dtype: torch.dtype) -> None:
    ours, right = gradients(OPS, dtype, ROUTINGS[name]), gradients(PLAIN, dtype, ROUTINGS[name])
    # As in test_gradients.py: one rounding of the result, float32 sums, rounded intermediate gradients.
    tolerance = 4e-6 if dtype == torch.float32 else 1.6e-2
    for mine, theirs in zip(ours, right, strict=True):
        assert (mine.double() - theirs).abs().max() <= tolerance * max(1.0, float(theirs.abs().max()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_do_not_depend_on_threads(dtype: torch.dtype) -> None:
    with threads(1):
        one = gradients(OPS, dtype, ROUTINGS["deepseek v3"])
    for count in (2, 4):
        with threads(count):
            many = gradients(OPS, dtype, ROUTINGS["deepseek v3"])
        assert [differing(a, b) for a, b in zip(one, many, strict=True)] == [0] * len(one)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    weights = [randn(e, 8, 16).requires_grad_() for e in range(3)]
    OPS.grouped_linear(randn(9, 5, 16), weights, torch.tensor([0, 5, 5, 5], dtype=torch.int32)).sum().backward()
    assert weights[0].grad is not None
    assert weights[0].grad.any()
    assert all(weight.grad is not None and not weight.grad.any() for weight in weights[1:])


def test_balance_loss_and_its_gradient_agree_with_float64() -> None:
    def run(ops: Operators, change: Callable[[Tensor], Tensor]) -> list[Tensor]:
        logits = [change(randn(i, 50, E)).requires_grad_() for i in range(3)]
        loss = ops.balance_loss(logits, [ops.route(part.detach(), Routing(2)).offsets for part in logits])
        (3 * loss).backward()
        return [loss.detach(), *(part.grad for part in logits if part.grad is not None)]

    for mine, right in zip(run(OPS, Tensor.clone), run(PLAIN, Tensor.double), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=1e-6, atol=1e-8)


def test_no_gradient_is_lost_in_silence() -> None:
    packed = [OPS.pack(randn(1, 16, 16), torch.float32)]
    with pytest.raises(RuntimeError, match="has no gradient"):
        OPS.grouped_linear(randn(0, 5, 16).requires_grad_(), packed, torch.tensor([0, 5], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="has no gradient"):
        OPS.grouped_gated(
            randn(0, 5, 16).requires_grad_(), packed, packed, torch.tensor([0, 5], dtype=torch.int32), "silu"
        )
