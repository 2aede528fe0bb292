"""Bytes of a micro-batch that layers keep for their backward, and of what passes between stages."""

from __future__ import annotations

import numpy as np

from lockstep.plan.columns import Column, Columns


def away_layers(rows: Columns) -> Column:
    """Layers of the fullest stage that are offloaded: of those that are not recomputed."""
    return np.minimum(rows.offload_layers, rows.slow_layers * (1 - rows.full))


def stage_bytes(rows: Columns) -> Column:
    """Bytes of one micro-batch that the fullest stage keeps on the device: offloaded layers wait in host memory."""
    return layer_bytes(rows) * rows.slow_layers - away_layers(rows) * plain_layer_bytes(rows)


def moving_bytes(rows: Columns) -> Column:
    """Two layers are on the device while one leaves, or comes back: what that is beyond the layers that stay, of
    which nothing is there yet, or any more."""
    away = away_layers(rows)
    stay = rows.slow_layers * (1 - rows.full) - away
    return np.where(away > 0, np.maximum(0.0, np.minimum(2.0, stay + away) - stay), 0.0) * plain_layer_bytes(rows)


def layer_bytes(rows: Columns) -> Column:
    """Bytes that one layer keeps for its backward, per micro-batch, after recomputation's choice."""
    unit = rows.tokens * rows.hidden
    full = rows.residual_bytes * unit / np.where(rows.sequence_parallel > 0, rows.tp, 1.0)
    return rows.full * full + (1 - rows.full) * plain_layer_bytes(rows)


def plain_layer_bytes(rows: Columns) -> Column:
    """Bytes of a layer that is not recomputed fully (its scores may be)."""
    return unsaved_bytes(rows) - np.where(rows.recompute == 1, _score_bytes(rows), 0.0)


def unsaved_bytes(rows: Columns) -> Column:
    """The same without any recomputation: arXiv 2205.05198 term by term, for any width, grouping and gating.

    Norm inputs 4h (8h where the residual stream is float32), attention and MLP inputs 4h, two dropout masks; per tensor
    rank: query, key, value, the core's output, MLP values before and after the activation; unfused attention keeps
    scores, mask and dropped scores.
    """
    experts = rows.experts_per_token * rows.expert_intermediate + rows.shared_intermediate
    middle = (1 - rows.moe) * rows.intermediate + rows.moe * experts
    split = np.where(rows.sequence_parallel > 0, rows.tp, 1.0)
    whole = rows.hidden * (2 * rows.residual_bytes + 4 + 2 * rows.dropout) / split
    whole = whole + 2 * 2 * rows.latent  # before and after their norms
    # Where ranks exchange rows for heads (cp), attention keeps its output by heads, and the product behind it by rows.
    cores = 2 * rows.core * np.where(rows.ours & (rows.cp > 1), 2.0, 1.0)
    inside = 2 * (rows.query + rows.keys + rows.values) + cores + 2 * rows.matrices * middle
    return rows.tokens * (whole + inside / rows.tp) + _score_bytes(rows) + routed_bytes(rows)


def routed_bytes(rows: Columns) -> Column:
    """Of this system: a token's rows as its experts read them and as they come back, and the router's scores."""
    each = 2 * 2 * rows.experts_per_token * rows.hidden + 4 * rows.experts
    return np.where(rows.ours, rows.moe * rows.tokens * each, 0.0)


def _score_bytes(rows: Columns) -> Column:
    """Scores and masks of unfused attention: softmax, its dropout (2 bytes) and mask (1). Fused: 4 per row."""
    per_pair = rows.unfused * (2 + 3 * rows.dropout) * rows.seq + (1 - rows.unfused) * 4
    return rows.tokens * rows.heads / rows.tp * per_pair


def forward_bytes(rows: Columns) -> Column:
    """What comes and goes in a layer's forward beside all that it keeps: what its last product gives, 16-bit; where
    ranks add that up, in float32, as it comes in, and the sum."""
    unit = rows.tokens * rows.hidden
    return np.where(rows.ours & (rows.moe == 0) & (rows.tp == 1), 2 * unit, 8 * unit)


def message_bytes(rows: Columns) -> Column:
    """One activation or its gradient on its way between stages: the residual stream."""
    return rows.residual_bytes * rows.tokens * rows.hidden / np.where(rows.sequence_parallel > 0, rows.tp, 1.0)
