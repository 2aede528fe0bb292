"""Bytes of what comes and goes with a layer: its weights where they are sharded, its activations where made again."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.columns import Column, Columns
from lockstep.plan.gradient_bytes import defers, largest_bytes, unit_bytes
from lockstep.plan.kept_bytes import away_layers, message_bytes, plain_layer_bytes, unsaved_bytes


def gathers(rows: Columns) -> NDArray[np.bool_]:
    """Whether weights are sharded, and gathered layer by layer."""
    return rows.ours & (rows.fsdp >= 3) & (rows.sharing > 1)


def gather_copies(rows: Columns) -> Column:
    """With weights sharded: how often a unit's weights are there while they are gathered: whole, as they come from each
    rank, and the own ones as they are sent; 0 elsewhere."""
    return np.where(gathers(rows), 2 + 1 / rows.sharing, 0.0)


def gathered_bytes(rows: Columns, again: bool) -> Column:
    """With weights sharded: the head, from a micro-batch's loss to its backward; a layer's weights, twice while they
    are gathered, and beside the first of their gradients, when a layer that is recomputed (again) holds most."""
    layer, words = unit_bytes(rows)
    copies = 2 + 1 / rows.sharing
    beside = np.maximum(copies * layer - recomputed_bytes(rows), np.where(defers(rows), 1.0, 1.25) * layer)
    each = np.where(again & (rows.full > 0), beside, copies * layer)
    return np.where(gathers(rows), words + each, 0.0)


def recomputed_bytes(rows: Columns) -> Column:
    """One layer's activations that the backward makes again, and the gradients that it begins with, of the stream and
    of the MLP's values."""
    dense, routed = (1 - rows.moe) * rows.intermediate, rows.moe * rows.experts_per_token * rows.expert_intermediate
    begun = rows.tokens * (6 * rows.hidden + 2 * (dense + routed) / rows.tp)
    # The gradient of the product that comes first, and what it is made of once more, packed; or, where it is put off,
    # the gradients of the MLP's values that are made of its input's.
    first = 2 * rows.tokens * (dense + routed) / rows.tp + largest_bytes(rows)
    put_off = 2 * rows.tokens * ((rows.matrices - 1) * dense / rows.tp + rows.moe * rows.hidden)
    begun = begun + np.where(defers(rows), put_off, first)
    # Ranks add up what the layer's last product gives once more: in float32, as it comes in, and the sum.
    added = 8 * rows.tokens * rows.hidden + 1.5 * message_bytes(rows)
    begun = np.where(rows.tp > 1, np.maximum(begun, added), begun)
    # Rows of experts' gradients as they are sent, received and put in order.
    begun = begun + np.where(rows.ep > 1, 3 * 2 * rows.moe * rows.tokens * rows.experts_per_token * rows.hidden, 0.0)
    again = unsaved_bytes(rows) - message_bytes(rows) + np.where(rows.ours, begun, 0.0)
    return np.where((rows.full > 0) | (rows.recompute > 0), again, 0.0)


def recompute_bytes(rows: Columns) -> Column:
    """What comes and goes while a layer is recomputed: its activations with the first gradients of its own, or the
    gradients of the residual stream."""
    return np.maximum(recomputed_bytes(rows), rows.tokens * rows.hidden * 2 * 4) + gathered_bytes(rows, again=True)


def working_bytes(rows: Columns) -> Column:
    """What comes and goes beside all that is kept: the backward's gradients of the residual stream; or one layer's
    recomputed activations, which come when the layers that keep theirs have freed them."""
    stay = rows.slow_layers * (1 - rows.full) - away_layers(rows)
    stream = rows.tokens * rows.hidden * 2 * 4 + gathered_bytes(rows, again=False)
    return np.maximum(stream, recompute_bytes(rows) - stay * plain_layer_bytes(rows))
