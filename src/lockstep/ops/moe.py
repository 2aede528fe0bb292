"""Mixture of experts under the bit contract: router, rows to their experts and back, products between, balance loss.

Order of sums: `csrc/router.cpp`, `csrc/moe.cpp`. A token's experts stand in ascending order; which other tokens chose
the same expert never changes a bit of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from lockstep.ops.batch import Routes, Routing
from lockstep.ops.linear import PackedWeight, refuse_gradient


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> Routes:
    """Choose `top_k` of E experts for every row of logits float32 [T, E]; the weights have a gradient.

    bias: float32 [E] or None, added to the scores for the choice alone (DeepSeek-V3).
    """
    weights, chosen = _Route.apply(logits, routing, None if bias is None else bias.detach().float())
    return Routes(weights, chosen, *torch.ops.lockstep.group(chosen, logits.shape[1]))


def dispatch(x: Tensor, routes: Routes) -> Tensor:
    """x [T, D] -> [T k, D]: every token once for each of its experts, in the order of experts."""
    y: Tensor = _Dispatch.apply(x, routes.rows, routes.slots)
    return y


def grouped_linear(x: Tensor, weights: Sequence[Tensor | PackedWeight], offsets: Tensor) -> Tensor:
    """Rows offsets[e] .. offsets[e + 1] of x [R, K] times weights[e] [N, K] transposed: [R, N], the bits of `linear`.

    Packed weights have no gradient: RuntimeError where one would be asked for.
    """
    if isinstance(weights[0], PackedWeight):
        refuse_gradient("a grouped product with packed weights", x)
        panels = [weight.panels for weight in weights if isinstance(weight, PackedWeight)]
        packed: Tensor = torch.ops.lockstep.grouped_gemm(x.contiguous(), offsets, panels, weights[0].n)
        return packed
    y: Tensor = _GroupedLinear.apply(x, offsets, *weights)
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
    share = torch.ops.lockstep.balance_share(list(offsets), sum(len(part) for part in logits))
    loss: Tensor = _Balance.apply(share, *logits)
    return loss


class _Route(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, routing: Routing, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        r = routing
        weights, chosen = torch.ops.lockstep.route(
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
        d = torch.ops.lockstep.route_backward(
            grads[0].contiguous(), logits, chosen, r.scoring == "sigmoid", r.normalize, r.scale
        )
        return d, None, None


class _Dispatch(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(slots)
        return torch.ops.lockstep.dispatch(x.contiguous(), rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (slots,) = ctx.saved_tensors
        return torch.ops.lockstep.dispatch_backward(grads[0].contiguous(), slots), None, None


class _GroupedLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, offsets: Tensor, *weights: Tensor) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, offsets, *weights)
        return torch.ops.lockstep.grouped_product(x, offsets, _plain(weights), False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, offsets, *weights = ctx.saved_tensors
        dy = grads[0].to(x.dtype).contiguous()
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.ops.lockstep.grouped_product(dy, offsets, _plain(weights), True)
        dw: list[Tensor | None] = [None] * len(weights)
        if any(ctx.needs_input_grad[2:]):
            stacked = torch.ops.lockstep.grouped_weight_gradient(dy, x, offsets)
            dw = [gradient.to(weight.dtype) for gradient, weight in zip(stacked, weights, strict=True)]
        return dx, None, *dw


def _plain(weights: Sequence[Tensor]) -> list[Tensor]:
    return [weight.detach().contiguous() for weight in weights]


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, slots: Tensor) -> Tensor:
        y, weights = y.contiguous(), weights.contiguous()
        ctx.save_for_backward(y, weights, slots)
        return torch.ops.lockstep.combine(y, weights, slots)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy, dw = torch.ops.lockstep.combine_backward(grads[0].contiguous(), *ctx.saved_tensors)
        return dy, dw, None


class _Balance(Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, *logits: Tensor) -> Tensor:
        """share float32 [E]: E f_e / rows."""
        sums = torch.ops.lockstep.softmax_sums(logits[0].contiguous())
        for part in logits[1:]:
            sums = sums + torch.ops.lockstep.softmax_sums(part.contiguous())
        ctx.save_for_backward(share, *logits)
        return torch.ops.lockstep.column_sums((share * sums)[:, None].contiguous())[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        share, *logits = ctx.saved_tensors
        d_sums = (share * grads[0]).contiguous()
        return None, *(torch.ops.lockstep.softmax_sums_backward(d_sums, part.contiguous()) for part in logits)
