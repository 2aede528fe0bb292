"""Bytes of gradients: their sums over micro-batches, what is given away of them, and what makes them later."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.columns import Column, Columns
from lockstep.plan.kept_bytes import message_bytes, routed_bytes
from lockstep.plan.layout import SCHEDULES, SPLIT
from lockstep.plan.parameters import expert_parameters, parameters

MASTER, SUM = 4.0, 4.0
"""Bytes per parameter in this system: float32 weight, and every partial sum of gradients that is alive."""


def embedding_halves(rows: Columns) -> Column:
    """Of this system: gradients of a tied embedding that wait on the last stage for their rows from the first."""
    apart = rows.ours & (rows.tied > 0) & (rows.pp > 1) & ~rows.folded
    way = rows.pp * np.where(rows.schedule == SCHEDULES.index("gpipe"), 2.0, 1.0)
    return np.where(apart, np.minimum(rows.micro_batches, way), 0.0)


def waiting_sums(rows: Columns, done: Column) -> Column:
    """Of this system: sums of gradients that wait when a rank has done so many micro-batches. Of the canonical groups
    that are whole there are as many as their number has bits set (a tree's nodes); beside them that of one begun."""
    whole = np.floor(_summed(rows, done) / rows.group_size)
    return np.bitwise_count(whole.astype(np.int64)) + begun(rows, done)


def begun(rows: Columns, done: Column) -> NDArray[np.bool_]:
    """Whether the next micro-batch goes on with a canonical group."""
    return _summed(rows, done) % rows.group_size > 0


def layerwise(rows: Columns) -> NDArray[np.bool_]:
    """Of this system: whether a layer's gradients are added up, or exchanged, before the next layer's are made."""
    alone = (rows.pp * rows.dp * rows.cp * rows.tp == 1) & (rows.full == 0) & (rows.offload_layers == 0)
    return rows.ours & (((rows.fsdp >= 2) & (rows.sharing > 1)) | ((rows.group_size > 1) & ~alone))


def most_sums(rows: Columns, done: Column) -> Column:
    """The most that `waiting_sums` was until then."""
    ends = np.ceil(_summed(rows, done) / rows.group_size)  # of groups that are whole or begun
    return np.where(rows.group_size > 1, np.ceil(np.log2(ends + 1)), np.floor(np.log2(ends + 1)))


def _summed(rows: Columns, done: Column) -> Column:
    """Micro-batches whose gradients a rank has a part of, when it has done so many itself."""
    return done * np.where(rows.ours & (rows.fsdp >= 2), rows.dp, 1.0)


def sums_when_reducing(rows: Columns) -> Column:
    """Sums of gradients at the end of a step: replicas send them to one another, and what goes out and what comes in
    stands beside the sum itself: of this system the nodes of a tree, each of as many canonical groups as a power of
    two. Where those are sharded, and the weights are not, this system's replicas collect all
    new weights at once: as many bytes as a sum that is not sharded, and the own ones once more."""
    group = rows.sharing
    gathered = np.where(rows.ours & (rows.fsdp == 2) & (group > 1), 2.0 + group, 1.0)
    groups = np.maximum(1.0, np.floor(rows.micro_batches / rows.group_size)).astype(np.int64)
    nodes = np.where(rows.ours, np.bitwise_count(groups), 1.0)
    return np.where((group > 1) & (rows.fsdp < 2), 1.0 + nodes * (2.0 - 1.0 / group), gathered)


def spread_gradients(rows: Columns) -> Column:
    """Of this system: bytes of the partial sums of experts' gradients that wait beside a rank's own. A rank that holds
    experts for others has their gradients of every rank's micro-batches; these are neighbours in the tree, and added at
    once, where gradients are sharded; otherwise each rank's are a run of their own, which ends with the step."""
    experts = expert_parameters(rows) * SUM
    apart = rows.ours & (rows.fsdp < 2) & (rows.micro_batches > 1)
    return np.where(apart, (rows.ep - 1) * experts, 0.0)


def unit_bytes(rows: Columns) -> tuple[Column, Column]:
    """Of this system: float32 bytes of a layer's weights, and of the embedding (or head)."""
    layers = np.maximum(rows.slow_layers, 1)
    return (
        MASTER * parameters(rows, np.zeros(len(rows))) / layers,
        MASTER * rows.vocab * rows.hidden / rows.tp,
    )


def unit_copies(rows: Columns) -> Column:
    """Where gradients are given away unit by unit, how often a unit's gradient is there meanwhile: itself and, with
    gradients sharded, what goes out, and what comes in from the other replicas; 0 elsewhere."""
    return np.where(layerwise(rows), np.where(rows.fsdp >= 2, 3.0 - 1.0 / rows.sharing, 1.0), 0.0)


def exchanged_bytes(rows: Columns, put_off: bool) -> Column:
    """Where gradients are given away unit by unit: bytes of a layer's gradients that are there meanwhile. With
    gradients sharded first the layer's own beside what goes out, then this, what comes in and the gradient that was
    made last, which nobody has let go yet. Otherwise all of a layer's; where products were put off, one at a time.
    """
    layer, _ = unit_bytes(rows)
    spread = np.where(rows.ep > 1, 1.0, 0.0) * SUM * expert_parameters(rows) / np.maximum(rows.slow_layers, 1)
    own = layer - spread
    largest = largest_bytes(rows)
    made_last = SUM * rows.hidden * rows.query / rows.tp if put_off else largest
    shared = _copied(own, rows.sharing, made_last)
    experts = _copied(spread, np.maximum(1.0, rows.dp / rows.ep), largest)
    # Each rank's rows have gradients of their own, whose sums wait until their neighbours' are there.
    alone = np.bitwise_count((rows.ep - 1).astype(np.int64))
    experts = experts + spread * np.where(rows.group_size > 1, np.minimum(alone, 1), alone)
    # Experts' gradients go before the others of their layer, which a backward pass has made by then.
    shared = np.maximum(shared, experts + (0.0 if put_off else own) * (spread > 0))
    return np.where(rows.fsdp >= 2, shared, largest if put_off else layer)


def largest_bytes(rows: Columns) -> Column:
    """The gradient of the largest matrix of a layer, float32."""
    middle = (1 - rows.moe) * rows.intermediate + rows.moe * rows.expert_intermediate
    return SUM * rows.hidden * middle / rows.tp


def _copied(layer: Column, ranks: Column, made_last: Column) -> Column:
    return np.maximum(2 * layer, (2 - 1 / ranks) * layer + np.minimum(made_last, layer))


def defers(rows: Columns) -> NDArray[np.bool_]:
    """Whether products for weights' gradients are put off: to W or, where ranks of this system share rows out (cp), to
    the end of their layer's backward."""
    split = (rows.pp > 1) & np.isin(rows.schedule, [SCHEDULES.index(name) for name in SPLIT])
    return split | (rows.ours & (rows.cp > 1))


def deferred_bytes(rows: Columns) -> Column:
    """Bytes of one layer between a split backward's B and W: inputs and output gradients of every product, 16-bit."""
    late = _experts_wait(rows)
    experts = late * rows.experts_per_token * rows.expert_intermediate + rows.shared_intermediate
    middle = (1 - rows.moe) * rows.intermediate + rows.moe * experts
    gradients = rows.query + rows.keys + rows.values + (rows.matrices - 1) * middle
    dense = 2 - rows.moe * (1 - late) * (rows.shared_intermediate == 0) / 2
    outputs = 2 * rows.tokens * (dense * rows.hidden + gradients / rows.tp + rows.latent)
    return deferred_inputs(rows) + outputs + late * routed_bytes(rows)


def deferred_inputs(rows: Columns) -> Column:
    """Of those the inputs, which a layer keeps for its backward anyway. Where tensor ranks share rows out, each keeps
    its own of what they gather."""
    experts = _experts_wait(rows) * rows.experts_per_token * rows.expert_intermediate + rows.shared_intermediate
    middle = (1 - rows.moe) * rows.intermediate + rows.moe * experts
    dense = 2 - rows.moe * (1 - _experts_wait(rows)) * (rows.shared_intermediate == 0) / 2
    stream = dense * rows.hidden / np.where(rows.sequence_parallel > 0, rows.tp, 1.0)
    return 2 * rows.tokens * (stream + (rows.core + middle) / rows.tp + rows.latent)


def _experts_wait(rows: Columns) -> Column:
    """Whether products of experts are put off: in this system only where ranks share those out (ep)."""
    return np.where(rows.ours & (rows.ep == 1), 0.0, 1.0)


def early_expert_bytes(rows: Columns) -> Column:
    """Gradients of one layer's experts that a split backward makes in B, where their products are not put off."""
    return SUM * expert_parameters(rows) / np.maximum(rows.slow_layers, 1) * (1 - _experts_wait(rows))


def mlp_gradient_bytes(rows: Columns) -> Column:
    """Where products for weights are put off: gradients of one layer's MLP while all that the layer keeps is there yet,
    beyond those of the stream; 16-bit. Of experts the output gradients: the stream's, gate's and up's."""
    routed = rows.experts_per_token * rows.expert_intermediate / rows.tp
    dense = np.maximum(0.0, rows.matrices * rows.intermediate / rows.tp - rows.hidden)
    each = (1 - rows.moe) * dense + rows.moe * (rows.hidden + (rows.matrices - 1) * routed)
    return 2 * rows.tokens * each


def held_gradient_bytes(rows: Columns) -> tuple[Column, Column]:
    """Gradients beside a layer whose activations all stay until its backward is over: in the MLP, of the stream and of
    the MLP's values or, where ranks add up that of its input, that sum in float32 as it is exchanged; and at the end,
    of the stream in the middle of the layer, of its input by the first norm, and their sum."""
    unit, stream = rows.tokens * rows.hidden, message_bytes(rows)
    middle = rows.tokens * rows.intermediate / rows.tp
    gated = stream + np.where(defers(rows), 2 * unit, 0.0) + 2 * rows.matrices * middle
    added = 8 * unit + np.where(rows.tp > 1, stream, 0.0)
    summed = 2 * (rows.matrices - 1) * middle + added
    inside = np.where(rows.ours & (rows.moe == 0), np.maximum(gated, summed), 0.0)
    return np.maximum(inside, 8 * unit), np.where(rows.ours, np.maximum(3 * stream, added), 8 * unit)


def first_gradient_bytes(rows: Columns) -> Column:
    """Gradients beside a layer that keeps its activations, as its backward begins and makes the gradient of the weight
    of its last product at once: of the stream, also in 16 bits, and of that product's input, and what the gradient is
    made of once more, packed."""
    middle = rows.tokens * rows.intermediate / rows.tp
    begun = message_bytes(rows) + 2 * rows.tokens * rows.hidden + 2 * 2 * middle + largest_bytes(rows)
    return np.where(rows.ours & (rows.moe == 0) & ~defers(rows), begun, 0.0)
