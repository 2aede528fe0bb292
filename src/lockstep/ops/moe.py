"""Mixture of experts under the bit contract: router, rows to their experts and back, products between, balance loss.

Order of sums: `csrc/router.cpp`, `csrc/moe.cpp`. A token's experts stand in ascending order; which other tokens chose
the same expert never changes a bit of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function

from lockstep.errors import LockstepError
from lockstep.ops.batch import Routes, Routing
from lockstep.ops.first_order import first_order
from lockstep.ops.gated import code_of
from lockstep.ops.linear import PackedWeight, expect_alike, refuse_gradient
from lockstep.ops.raw import kernel


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> Routes:
    """Choose `top_k` of E experts for every row of logits float32 [T, E]; the weights have a gradient.

    bias: float32 [E] or None, added to the scores for the choice alone (DeepSeek-V3).
    """
    weights, chosen = _Route.apply(logits, routing, None if bias is None else bias.detach().float())
    return Routes(weights, chosen, *kernel.group(chosen, logits.shape[1]))


def dispatch(x: Tensor, routes: Routes) -> Tensor:
    """x [T, D] -> [T k, D]: every token once for each of its experts, in the order of experts."""
    y: Tensor = _Dispatch.apply(x, routes.rows, routes.slots)
    return y


def grouped_linear(x: Tensor, weights: Sequence[Tensor | PackedWeight], offsets: Tensor) -> Tensor:
    """Rows offsets[e] .. offsets[e + 1] of x [R, K] times weights[e] [N, K] transposed: [R, N], the bits of `linear`.

    Packed weights have no gradient: RuntimeError where one would be asked for.
    """
    _expect_experts("grouped_linear", weights)
    if isinstance(weights[0], PackedWeight):
        refuse_gradient("a grouped product with packed weights", x)
        panels = [weight.panels for weight in weights if isinstance(weight, PackedWeight)]
        packed: Tensor = kernel.grouped_gemm(x.contiguous(), offsets, panels, weights[0].n)
        return packed
    y: Tensor = _GroupedLinear.apply(x, offsets, *weights)
    return y


def grouped_gated(
    x: Tensor, gates: Sequence[Tensor | PackedWeight], ups: Sequence[Tensor | PackedWeight], offsets: Tensor,
    activation: str,
) -> Tensor:  # fmt: skip
    """`gated` of `grouped_linear` with gates and of that with ups, both [F, K] or packed, in one pass: [R, F]."""
    code = code_of(activation)
    _expect_experts("grouped_gated", [*gates, *ups])
    if isinstance(gates[0], PackedWeight):
        refuse_gradient("a grouped product with packed weights", x)
        panels = [[weight.panels for weight in side if isinstance(weight, PackedWeight)] for side in (gates, ups)]
        packed = kernel.grouped_gated(x.contiguous(), offsets, *panels, gates[0].n, code, False)
        return packed[0]
    y: Tensor = _GroupedGated.apply(x, offsets, code, *gates, *ups)
    return y


def combine(y: Tensor, routes: Routes) -> Tensor:
    """y [T k, D] in the order of experts -> [T, D]: the weighted sum over each token's experts, ascending."""
    out: Tensor = _Combine.apply(y, routes.weights, routes.slots)
    return out


def balance_loss(logits: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
    """E sum_e f_e p_e over the rows of all layers: f_e choices of expert e per row, p_e its mean softmax probability.

    logits: of each layer, float32 [T, E]; offsets: of its Routes. A float32 scalar, top_k where all experts are used
    alike (Switch Transformer, arXiv 2101.03961, equations 4 to 6, as `transformers` sums it over layers).
    """
    if not logits or len(logits) != len(offsets):
        raise LockstepError(
            f"balance_loss was given the logits of {len(logits)} layers and the offsets of {len(offsets)}: expected "
            "both of each layer, and at least one."
        )
    share = kernel.balance_share(list(offsets), sum(len(part) for part in logits))
    loss: Tensor = _Balance.apply(share, *logits)
    return loss


def _expect_experts(what: str, weights: Sequence[Tensor | PackedWeight]) -> None:
    if not weights:
        raise LockstepError(f"{what} was asked for with no expert: give a weight for each group of rows.")
    expect_alike(what, weights)


@first_order
class _Route(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        r = routing
        weights, chosen = kernel.route(
            logits, bias, r.top_k, r.scoring == "sigmoid", r.normalize, r.groups, r.top_groups, r.pairs, r.scale
        )
        ctx.save_for_backward(logits, chosen)
        ctx.routing = r
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        logits, chosen = ctx.saved_tensors
        r = ctx.routing
        d = kernel.route_backward(grads[0].contiguous(), logits, chosen, r.scoring == "sigmoid", r.normalize, r.scale)
        return d, None, None


@first_order
class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return kernel.dispatch(x.contiguous(), rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return kernel.dispatch_backward(grads[0].contiguous(), slots), None, None


@first_order
class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, *weights: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, offsets, *weights)
        return kernel.grouped_product(x, offsets, _plain(weights), False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, offsets, *weights = ctx.saved_tensors
        dy = grads[0].to(x.dtype).contiguous()
        dx = _input_gradient(dy, offsets, weights) if ctx.needs_input_grad[0] else None
        return dx, None, *_weight_gradients(dy, x, offsets, weights, any(ctx.needs_input_grad[2:]))


@first_order
class _GroupedGated(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, code: int, *weights: Tensor) -> Tensor:
        """weights: the gates, then as many ups."""
        x, experts = x.contiguous(), len(weights) // 2
        gates, ups = _plain(weights[:experts]), _plain(weights[experts:])
        y, gate, up = kernel.grouped_gated_product(x, offsets, gates, ups, code, True)
        ctx.save_for_backward(x, offsets, gate, up, *weights)
        ctx.code = code
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, offsets, gate, up, *weights = ctx.saved_tensors
        d_gate, d_up = kernel.gated_backward(grads[0].contiguous(), gate, up, ctx.code)
        gates, ups = weights[: len(weights) // 2], weights[len(weights) // 2 :]
        dx = None
        if ctx.needs_input_grad[0]:
            # Autograd adds the gradient of the later product (up) first; the sum of two is the same either way.
            of_up, of_gate = (_input_gradient(d, offsets, side) for d, side in ((d_up, ups), (d_gate, gates)))
            dx = of_up + of_gate
        needed = any(ctx.needs_input_grad[3:])
        dw = [*_weight_gradients(d_gate, x, offsets, gates, needed), *_weight_gradients(d_up, x, offsets, ups, needed)]
        return dx, None, None, *dw


def _input_gradient(dy: Tensor, offsets: Tensor, weights: Sequence[Tensor]) -> Tensor:
    dx: Tensor = kernel.grouped_product(dy, offsets, _plain(weights), True)
    return dx


def _weight_gradients(
    dy: Tensor, x: Tensor, offsets: Tensor, weights: Sequence[Tensor], needed: bool
) -> list[Tensor | None]:
    if not needed:
        return [None] * len(weights)
    stacked = kernel.grouped_weight_gradient(dy, x, offsets)
    return [gradient.to(weight.dtype) for gradient, weight in zip(stacked, weights, strict=True)]


def _plain(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().contiguous() for weight in weights]


@first_order
class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        y, weights = y.contiguous(), weights.contiguous()
        ctx.save_for_backward(y, weights, slots)
        return kernel.combine(y, weights, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, dw = kernel.combine_backward(grads[0].contiguous(), *ctx.saved_tensors)
        return dy, dw, None


@first_order
class _Balance(Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, *logits: Tensor) -> Tensor:
        """share float32 [E]: E f_e / rows."""
        sums = kernel.softmax_sums(logits[0].contiguous())
        for part in logits[1:]:
            sums = sums + kernel.softmax_sums(part.contiguous())
        ctx.save_for_backward(share, *logits)
        return kernel.column_sums((share * sums)[:, None].contiguous())[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        share, *logits = ctx.saved_tensors
        d_sums = (share * grads[0]).contiguous()
        return None, *(kernel.softmax_sums_backward(d_sums, part.contiguous()) for part in logits)
