"""Memory of a rank in closed form: weights, gradients, optimizer, activations in flight, logits, buffers, margin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.plan.columns import Column, Columns
from lockstep.plan.gathered_bytes import working_bytes
from lockstep.plan.gradient_bytes import (
    MASTER,
    SUM,
    begun,
    embedding_halves,
    layerwise,
    most_sums,
    spread_gradients,
    sums_when_reducing,
    unit_bytes,
    unit_copies,
    waiting_sums,
)
from lockstep.plan.kept_bytes import message_bytes, moving_bytes, stage_bytes
from lockstep.plan.layout import SCHEDULES, SPLIT
from lockstep.plan.loss_bytes import logits_bytes, loss_gradients, token_bytes
from lockstep.plan.parameters import parameters, sharded_parameters

_MOMENTS = 8.0
"""Bytes per parameter in this system of the two float32 moments."""
_WEIGHT, _GRADIENT, _OPTIMIZER = 2.0, 4.0, 12.0
"""The same of mixed precision: 16-bit weight, float32 gradient, float32 master and two moments (arXiv 2205.05198)."""
_RUNTIME_GB = 1.5
"""Device context, communication library and kernels."""
MARGIN = 0.04
"""What the allocator loses to fragmentation, as a fraction of the rest."""


def process_bytes(tensors: float) -> float:
    """What a process of this system takes beyond its tensors: the allocator's losses and the runtime."""
    return tensors * (1 + MARGIN) + _RUNTIME_GB * 1e9


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
    weights, one, optimizer = state_bytes(rows)
    kept = loss_gradients(rows)
    logits = logits_bytes(rows) - kept
    stage, flight = stage_bytes(rows), in_flight(rows)
    # The last stage holds one micro-batch, or all of them under GPipe; in V placement it is the first one too.
    alone = (rows.pp > 1) & ~rows.folded
    gradients, activations = _held_together(rows, one, stage + np.where(alone, 0.0, kept / rows.chunks), flight)
    gpipe = rows.schedule == SCHEDULES.index("gpipe")
    end = stage * rows.last_layers / np.maximum(rows.slow_layers, 1) + kept
    last_gradients, last = _held_together(rows, one, end, np.where(gpipe, flight, 1.0))
    last_gradients = last_gradients + embedding_halves(rows) * unit_bytes(rows)[1]
    heavier = alone & (last_gradients + last + logits > gradients + activations)
    gradients, activations = np.where(heavier, last_gradients, gradients), np.where(heavier, last, activations)
    logits = np.where(heavier | ~alone, logits, 0.0)
    # What is sent to another stage stays until the answer comes.
    messages = np.where((rows.pp > 1) & (rows.mixed == 0), flight * (2 * rows.chunks - 1) + 2, 0.0)
    layer, words = unit_bytes(rows)
    # The largest unit's gradients are given away when the micro-batch's activations and its logits have gone.
    copies, ends = unit_copies(rows), np.where((rows.pp == 1) | rows.folded, 2.0 - rows.tied, 1.0)
    exchanged = np.where(copies > 0, np.maximum(copies * layer + words, words * (ends + copies - 1)) - stage, 0.0)
    working = np.maximum(working_bytes(rows) + moving_bytes(rows), exchanged - logits) + messages * message_bytes(rows)
    working = working + token_bytes(rows)
    held = weights + optimizer + gradients + activations + working + logits
    return Memory(weights, gradients, optimizer, activations, working, logits, buffer_bytes(rows), MARGIN * held)


def _held_together(rows: Columns, one: Column, stage: Column, flight: Column) -> tuple[Column, Column]:
    """Gradients and activations of a stage at the worst moment; ``one``: bytes of one sum of gradients, ``stage`` of
    one micro-batch, ``flight``: micro-batches in flight.

    In this system a gradient is a tree over groups of micro-batches, so its partial sums wait while a micro-batch's is
    made. Towards the end the pipeline empties while the tree is at its fullest, so both are walked back.
    """
    m = rows.micro_batches
    split = np.isin(rows.schedule, [SCHEDULES.index(name) for name in SPLIT])
    gradients, activations = np.zeros(len(rows)), np.zeros(len(rows))
    for left in range(_WALK):  # micro-batches after this one
        leaf = np.maximum(m - 1 - left, 0)
        waiting = waiting_sums(rows, leaf)
        now = stage * np.minimum(flight, left + 1)
        if left == _WALK - 1:
            # All at once (GPipe): then no gradient waits yet.
            waiting, now = np.where(flight >= m, 0.0, most_sums(rows, leaf)), stage * flight
        # The gradient of the leaf grows while what the micro-batch held goes, or beside it in a W step.
        grows = ((one > stage) | split) & ~(layerwise(rows) & begun(rows, leaf))
        sums = one * (waiting + np.where(grows, 1 / rows.chunks, 0.0)) + spread_gradients(rows) * waiting
        held = np.maximum(now - np.where(grows & ~split, stage / rows.chunks, 0.0), 0.0)
        better = sums + held > gradients + activations
        gradients, activations = np.where(better, sums, gradients), np.where(better, held, activations)
    more = np.maximum(0.0, one * sums_when_reducing(rows) - gradients - activations)
    mixed = rows.mixed > 0
    return np.where(mixed, one, gradients + more), np.where(mixed, stage * flight, activations)


_WALK = 8
"""Micro-batches that are walked back one by one from the last; those before count as if all came together."""


def state_bytes(rows: Columns, vocabularies: Column | None = None) -> tuple[Column, Column, Column]:
    """Weights, one sum of gradients and optimizer of a rank after sharding; ``vocabularies`` as in ``parameters``."""
    mixed = rows.mixed > 0
    return (
        sharded_parameters(rows, 3, vocabularies) * np.where(mixed, _WEIGHT, MASTER),
        sharded_parameters(rows, 2, vocabularies) * np.where(mixed, _GRADIENT, SUM),
        sharded_parameters(rows, 1, vocabularies) * np.where(mixed, _OPTIMIZER, _MOMENTS),
    )


def buffer_bytes(rows: Columns) -> Column:
    """Gathered weights, buckets of the gradient reduction, and what the runtime takes."""
    # Weights that are sharded are gathered a layer ahead: two layers' weights in 16 bits. (In this system: `gathered`.)
    two = 2 * parameters(rows) / np.maximum(rows.slow_layers, 1) * _WEIGHT
    gathered = np.where((rows.mixed > 0) & (rows.fsdp >= 3), two, 0.0)
    # Two buckets are in flight. This system reduces from the sums themselves: what travels is in `rank_memory`.
    buckets = np.where((rows.mixed > 0) & (rows.dp * rows.cp > 1), 2 * rows.bucket_mb * 2**20, 0.0)
    return gathered + buckets + _RUNTIME_GB * 1e9


def in_flight(rows: Columns) -> Column:
    """Micro-batches whose activations the fullest stage holds at once (arXiv 2401.10241, 2405.15362, 2205.05198)."""
    p, m, v = rows.pp, rows.micro_batches, rows.chunks
    forms = {
        "gpipe": m,
        "1f1b": p,
        "interleaved": p * (1 + (p - 1) / (p * v)),
        "zb-h1": p,
        "zb-h2": 2 * p - 1,
        "zb-1p": np.ceil(1.2 * p),
        "zb-2p": m,
        "zb-v": p,
        "v-min": np.floor((p + 4) / 3),
        "v-half": np.floor((p + 2) / 2),
        "dualpipe-v": p + 0.5,
    }
    return np.minimum(m, np.choose(rows.schedule.astype(int), [forms[name] for name in SCHEDULES]))
