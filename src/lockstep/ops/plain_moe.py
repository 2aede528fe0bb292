"""Plain PyTorch references of mixture of experts and latent attention: the tests' oracle, and `numerics: fast`.

Shapes and meanings are those of ``Operators``; nothing here keeps the bit contract.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from lockstep.ops import plain
from lockstep.ops.batch import PAGE, LatentPages, Paged, Routes, Routing


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> Routes:
    scores = logits.softmax(-1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores.detach() if bias is None else scores.detach() + bias.detach().to(scores.dtype)
    if routing.groups > 1:
        choice = _best_groups(choice, routing)
    chosen = choice.topk(routing.top_k, dim=-1).indices.sort(-1).values
    weights = scores.gather(-1, chosen)
    if routing.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + (1e-20 if routing.scoring == "sigmoid" else 0.0))
    return _grouped(weights * routing.scale, chosen, logits.shape[1])


def _best_groups(choice: Tensor, routing: Routing) -> Tensor:
    """The scores, -inf outside each row's best groups."""
    grouped = choice.view(len(choice), routing.groups, -1)
    score = grouped.topk(2, -1).values.sum(-1) if routing.pairs else grouped.amax(-1)
    best = score.topk(routing.top_groups, -1).indices
    kept = torch.zeros_like(score, dtype=torch.bool).scatter(1, best, True)
    return grouped.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def _grouped(weights: Tensor, chosen: Tensor, experts: int) -> Routes:
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order))
    offsets = F.pad(torch.bincount(flat, minlength=experts).cumsum(0), (1, 0))
    parts = (chosen, offsets, order // chosen.shape[1], slots.view_as(chosen))
    return Routes(weights, *(part.to(torch.int32) for part in parts))


def dispatch(x: Tensor, routes: Routes) -> Tensor:
    return x[routes.rows.long()]


def grouped_gated(
    x: Tensor, gates: Sequence[Tensor], ups: Sequence[Tensor], offsets: Tensor, activation: str
) -> Tensor:
    return plain.gated(grouped_linear(x, gates, offsets), grouped_linear(x, ups, offsets), activation)


def grouped_linear(x: Tensor, weights: Sequence[Tensor], offsets: Tensor) -> Tensor:
    parts = [
        plain.linear(x[a:b], weight)
        for weight, (a, b) in zip(weights, pairwise(offsets.tolist()), strict=True)
        if a < b
    ]
    return torch.cat(parts)


def combine(y: Tensor, routes: Routes) -> Tensor:
    wide = torch.promote_types(y.dtype, routes.weights.dtype)
    return (y[routes.slots.long()].to(wide) * routes.weights[..., None].to(wide)).sum(1).to(y.dtype)


def balance_loss(logits: Sequence[Tensor], offsets: Sequence[Tensor]) -> Tensor:
    joined = torch.cat(list(logits))
    rows, experts = joined.shape
    counts = torch.stack([o.diff() for o in offsets]).sum(0)
    return experts * (counts / rows * joined.softmax(-1).mean(0)).sum()


def write_latents(latents: Tensor, pages: LatentPages, batch: Paged) -> None:
    page, offset = plain.slots(batch)
    pages.rows[page, offset] = latents


def latent_attention(q: Tensor, pages: LatentPages, batch: Paged, scale: float, v_dim: int) -> Tensor:
    parts = []
    for s, (a, b) in enumerate(pairwise(batch.starts.tolist())):
        first, last = int(batch.positions[a]), int(batch.positions[b - 1])
        latents = pages.rows[batch.page_table[s, : last // PAGE + 1].long()].flatten(0, 1)[: last + 1, None]
        parts.append(plain.attend(q[a:b], latents, latents[..., :v_dim], first, scale, None, 0.0))
    return torch.cat(parts)


def share_heads(x: Tensor, heads: int) -> Tensor:
    return x[:, None].expand(-1, heads, -1)
