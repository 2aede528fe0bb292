"""Memory of a rank in closed form: weights, gradients, optimizer, activations in flight, logits, buffers, margin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.plan.columns import Column, Columns
from lockstep.plan.layout import SCHEDULES
from lockstep.plan.parameters import parameters, sharded_parameters

_WEIGHT, _GRADIENT, _OPTIMIZER = 2.0, 4.0, 12.0
"""Bytes per parameter: 16-bit weight, float32 gradient, float32 master and two moments (18, as in arXiv 2205.05198)."""
_RUNTIME_GB = 1.5
"""Device context, communication library and kernels."""
MARGIN = 0.04
"""What the allocator loses to fragmentation, as a fraction of the rest."""
_CHUNK = 2**23
"""Logits that a chunked loss holds at a time (``ops.cross_entropy``)."""
_BUCKET_BYTES = 200e6
"""Buffers of the gradient reduction: two buckets in flight."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest rank, shape ``[rows]`` each; ``total`` is their sum."""

    weights: Column
    gradients: Column
    optimizer: Column
    activations: Column
    working: Column
    logits: Column
    buffers: Column
    margin: Column

    @property
    def total(self) -> Column:
        return sum((getattr(self, name) for name in PARTS), np.zeros(()))


PARTS = ("weights", "gradients", "optimizer", "activations", "working", "logits", "buffers", "margin")


def memory(rows: Columns) -> Memory:
    """Peak memory of the fullest rank: the first stage, or the last one where the logits weigh more.

    Both are evaluated: the first stage holds the most micro-batches, the last holds one and the logits.
    """
    states = state_bytes(rows)
    activations = stage_bytes(rows) * in_flight(rows)
    logits = logits_bytes(rows)
    # The last stage holds one micro-batch, or all of them under GPipe; in V placement it is the first one too.
    last = np.where(
        rows.schedule == SCHEDULES.index("gpipe"),
        activations,
        stage_bytes(rows) * rows.last_layers / np.maximum(rows.slow_layers, 1),
    )
    alone = (rows.pp > 1) & ~rows.folded
    heavier = alone & (last + logits > activations)
    activations, logits = np.where(heavier, last, activations), np.where(heavier | ~alone, logits, 0.0)
    working = working_bytes(rows)
    held = sum(states, np.zeros(())) + activations + working + logits
    return Memory(*states, activations, working, logits, buffer_bytes(rows), MARGIN * held)


def state_bytes(rows: Columns, vocabularies: Column | None = None) -> tuple[Column, Column, Column]:
    """Weights, gradients and optimizer state of a rank after sharding; ``vocabularies`` as in ``parameters``."""
    return (
        sharded_parameters(rows, 3, vocabularies) * _WEIGHT,
        sharded_parameters(rows, 2, vocabularies) * _GRADIENT,
        sharded_parameters(rows, 1, vocabularies) * _OPTIMIZER,
    )


def stage_bytes(rows: Columns) -> Column:
    """Bytes of one micro-batch that the fullest stage keeps on the device: offloaded layers wait in host memory."""
    away = np.minimum(rows.offload_layers, rows.slow_layers * (1 - rows.full))
    return layer_bytes(rows) * rows.slow_layers - away * plain_layer_bytes(rows)


def working_bytes(rows: Columns) -> Column:
    """What comes and goes: one layer's recomputed activations, and the backward's gradients of about one more."""
    inputs = rows.residual_bytes * rows.tokens * rows.hidden / np.where(rows.sequence_parallel > 0, rows.tp, 1.0)
    again = np.where((rows.full > 0) | (rows.recompute > 0), unsaved_bytes(rows) - inputs, 0.0)
    # A layer on its way out and one on its way back.
    moving = np.where(rows.offload_layers > 0, 2 * plain_layer_bytes(rows), 0.0)
    return again + moving + rows.tokens * rows.hidden * 2 * 4


def buffer_bytes(rows: Columns) -> Column:
    """Gathered weights, buckets of the gradient reduction, and what the runtime takes."""
    # Weights that are sharded are gathered a layer ahead: two layers' weights in 16 bits.
    gathered = np.where(rows.fsdp >= 3, 2 * parameters(rows) / np.maximum(rows.slow_layers, 1) * _WEIGHT, 0.0)
    return gathered + np.where(rows.dp * rows.cp > 1, 2 * _BUCKET_BYTES, 0.0) + _RUNTIME_GB * 1e9


def logits_bytes(rows: Columns) -> Column:
    """16-bit product, float32 logits and their gradient; in chunks, with the head's gradient made in the forward."""
    whole = rows.tokens * rows.vocab / rows.tp * (2 + 4 + 4)
    chunked = np.minimum(whole, _CHUNK * (2 + 4 + 4)) + 4 * rows.vocab * rows.hidden / rows.tp
    return np.where(rows.kept_logits > 0, whole, chunked)


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
    inside = 2 * (rows.query + 2 * rows.keys) + 2 * rows.query + 2 * rows.matrices * middle
    return rows.tokens * (whole + inside / rows.tp) + _score_bytes(rows)


def _score_bytes(rows: Columns) -> Column:
    """Scores and masks of unfused attention: softmax, its dropout (2 bytes) and mask (1). Fused: 4 per row."""
    per_pair = rows.unfused * (2 + 3 * rows.dropout) * rows.seq + (1 - rows.unfused) * 4
    return rows.tokens * rows.heads / rows.tp * per_pair


def in_flight(rows: Columns) -> Column:
    """Micro-batches whose activations the fullest stage holds at once (arXiv 2401.10241, 2405.15362, 2205.05198)."""
    p, m, v = rows.pp, rows.micro_batches, rows.chunks
    forms = {
        "gpipe": m,
        "1f1b": p,
        "interleaved": p * (1 + (p - 1) / (p * v)),
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-v": p,
        "v-half": np.floor((p + 2) / 2),
        "dualpipe-v": p + 0.5,
    }
    return np.minimum(m, np.choose(rows.schedule.astype(int), [forms[name] for name in SCHEDULES]))
