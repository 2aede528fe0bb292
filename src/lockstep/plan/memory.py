"""Memory of a rank in closed form: weights, gradients, optimizer, activations in flight, logits, buffers, margin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lockstep.plan.columns import Column, Columns
from lockstep.plan.layout import SCHEDULES, SPLIT
from lockstep.plan.parameters import expert_parameters, parameters, sharded_parameters

_MASTER, _MOMENTS, _SUM = 4.0, 8.0, 4.0
"""Bytes per parameter in this system: float32 weight, two moments, and every partial sum of gradients that is alive."""
_WEIGHT, _GRADIENT, _OPTIMIZER = 2.0, 4.0, 12.0
"""The same of mixed precision: 16-bit weight, float32 gradient, float32 master and two moments (arXiv 2205.05198)."""
_RUNTIME_GB = 1.5
"""Device context, communication library and kernels."""
MARGIN = 0.04
"""What the allocator loses to fragmentation, as a fraction of the rest."""
CHUNK = 2**23
"""Logits that a chunked loss holds at a time (``ops.cross_entropy``)."""


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
            waiting, now = np.where(flight >= m, 0.0, _most_sums(rows, leaf)), stage * flight
        # The gradient of the leaf grows while what the micro-batch held goes, or beside it in a W step.
        grows = ((one > stage) | split) & ~(layerwise(rows) & begun(rows, leaf))
        sums = one * (waiting + np.where(grows, 1 / rows.chunks, 0.0)) + spread_gradients(rows) * waiting
        held = np.maximum(now - np.where(grows & ~split, stage / rows.chunks, 0.0), 0.0)
        better = sums + held > gradients + activations
        gradients, activations = np.where(better, sums, gradients), np.where(better, held, activations)
    more = np.maximum(0.0, one * sums_when_reducing(rows) - gradients - activations)
    mixed = rows.mixed > 0
    return np.where(mixed, one, gradients + more), np.where(mixed, stage * flight, activations)


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


def _most_sums(rows: Columns, done: Column) -> Column:
    """The most that `waiting_sums` was until then."""
    ends = np.ceil(_summed(rows, done) / rows.group_size)  # of groups that are whole or begun
    return np.where(rows.group_size > 1, np.ceil(np.log2(ends + 1)), np.floor(np.log2(ends + 1)))


def _summed(rows: Columns, done: Column) -> Column:
    """Micro-batches whose gradients a rank has a part of, when it has done so many itself."""
    return done * np.where(rows.ours & (rows.fsdp >= 2), rows.dp, 1.0)


_WALK = 8
"""Micro-batches that are walked back one by one from the last; those before count as if all came together."""


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
    experts = expert_parameters(rows) * _SUM
    apart = rows.ours & (rows.fsdp < 2) & (rows.micro_batches > 1)
    return np.where(apart, (rows.ep - 1) * experts, 0.0)


def state_bytes(rows: Columns, vocabularies: Column | None = None) -> tuple[Column, Column, Column]:
    """Weights, one sum of gradients and optimizer of a rank after sharding; ``vocabularies`` as in ``parameters``."""
    mixed = rows.mixed > 0
    return (
        sharded_parameters(rows, 3, vocabularies) * np.where(mixed, _WEIGHT, _MASTER),
        sharded_parameters(rows, 2, vocabularies) * np.where(mixed, _GRADIENT, _SUM),
        sharded_parameters(rows, 1, vocabularies) * np.where(mixed, _OPTIMIZER, _MOMENTS),
    )


def stage_bytes(rows: Columns) -> Column:
    """Bytes of one micro-batch that the fullest stage keeps on the device: offloaded layers wait in host memory."""
    return layer_bytes(rows) * rows.slow_layers - away_layers(rows) * plain_layer_bytes(rows)


def away_layers(rows: Columns) -> Column:
    """Layers of the fullest stage that are offloaded: of those that are not recomputed."""
    return np.minimum(rows.offload_layers, rows.slow_layers * (1 - rows.full))


def moving_bytes(rows: Columns) -> Column:
    """Two layers are on the device while one leaves, or comes back: what that is beyond the layers that stay, of
    which nothing is there yet, or any more."""
    away = away_layers(rows)
    stay = rows.slow_layers * (1 - rows.full) - away
    return np.where(away > 0, np.maximum(0.0, np.minimum(2.0, stay + away) - stay), 0.0) * plain_layer_bytes(rows)


def working_bytes(rows: Columns) -> Column:
    """What comes and goes beside all that is kept: the backward's gradients of the residual stream; or one layer's
    recomputed activations, which come when the layers that keep theirs have freed them."""
    stay = rows.slow_layers * (1 - rows.full) - away_layers(rows)
    stream = rows.tokens * rows.hidden * 2 * 4 + gathered_bytes(rows, again=False)
    return np.maximum(stream, recompute_bytes(rows) - stay * plain_layer_bytes(rows))


def recompute_bytes(rows: Columns) -> Column:
    """What comes and goes while a layer is recomputed: its activations with the first gradients of its own, or the
    gradients of the residual stream."""
    return np.maximum(recomputed_bytes(rows), rows.tokens * rows.hidden * 2 * 4) + gathered_bytes(rows, again=True)


def unit_bytes(rows: Columns) -> tuple[Column, Column]:
    """Of this system: float32 bytes of a layer's weights, and of the embedding (or head)."""
    layers = np.maximum(rows.slow_layers, 1)
    return (
        _MASTER * parameters(rows, np.zeros(len(rows))) / layers,
        _MASTER * rows.vocab * rows.hidden / rows.tp,
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
    spread = np.where(rows.ep > 1, 1.0, 0.0) * _SUM * expert_parameters(rows) / np.maximum(rows.slow_layers, 1)
    own = layer - spread
    largest = largest_bytes(rows)
    made_last = _SUM * rows.hidden * rows.query / rows.tp if put_off else largest
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
    return _SUM * rows.hidden * middle / rows.tp


def _copied(layer: Column, ranks: Column, made_last: Column) -> Column:
    return np.maximum(2 * layer, (2 - 1 / ranks) * layer + np.minimum(made_last, layer))


def gather_copies(rows: Columns) -> Column:
    """With weights sharded: how often a unit's weights are there while they are gathered: whole, as they come from each
    rank, and the own ones as they are sent; 0 elsewhere."""
    return np.where(gathers(rows), 2 + 1 / rows.sharing, 0.0)


def gathers(rows: Columns) -> NDArray[np.bool_]:
    """Whether weights are sharded, and gathered layer by layer."""
    return rows.ours & (rows.fsdp >= 3) & (rows.sharing > 1)


def gathered_bytes(rows: Columns, again: bool) -> Column:
    """With weights sharded: the head, from a micro-batch's loss to its backward; a layer's weights, twice while they
    are gathered, and beside the first of their gradients, when a layer that is recomputed (again) holds most."""
    layer, words = unit_bytes(rows)
    copies = 2 + 1 / rows.sharing
    beside = np.maximum(copies * layer - recomputed_bytes(rows), np.where(defers(rows), 1.0, 1.25) * layer)
    each = np.where(again & (rows.full > 0), beside, copies * layer)
    return np.where(gathers(rows), words + each, 0.0)


def defers(rows: Columns) -> NDArray[np.bool_]:
    """Whether products for weights' gradients are put off: to W or, where ranks of this system share rows out (cp), to
    the end of their layer's backward."""
    split = (rows.pp > 1) & np.isin(rows.schedule, [SCHEDULES.index(name) for name in SPLIT])
    return split | (rows.ours & (rows.cp > 1))


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


def buffer_bytes(rows: Columns) -> Column:
    """Gathered weights, buckets of the gradient reduction, and what the runtime takes."""
    # Weights that are sharded are gathered a layer ahead: two layers' weights in 16 bits. (In this system: `gathered`.)
    two = 2 * parameters(rows) / np.maximum(rows.slow_layers, 1) * _WEIGHT
    gathered = np.where((rows.mixed > 0) & (rows.fsdp >= 3), two, 0.0)
    # Two buckets are in flight. This system reduces from the sums themselves: what travels is in `rank_memory`.
    buckets = np.where((rows.mixed > 0) & (rows.dp * rows.cp > 1), 2 * rows.bucket_mb * 2**20, 0.0)
    return gathered + buckets + _RUNTIME_GB * 1e9


def logits_bytes(rows: Columns) -> Column:
    """What the loss takes: 16-bit product, float32 logits and their gradient; in chunks, with the head's gradient made
    in the forward and its weight packed twice (``ops.raw.vocabulary.workspace``). Where ranks share the vocabulary,
    each one's gradient of the input is float32 until it is summed, that of a chunk's rows twice."""
    whole = rows.head_tokens * rows.vocab / rows.tp * (2 + 4 + 4)
    chunk = np.minimum(rows.head_tokens * rows.vocab / rows.tp, CHUNK)
    # The gradient of a chunk lies where its logits did; where ranks share the vocabulary, beside them.
    worked = chunk * np.where(rows.tp > 1, 4 + 2, 4) + 2 * 2 * rows.vocab * rows.hidden / rows.tp
    chunked = worked + loss_gradients(rows)
    at_once = np.minimum(rows.head_tokens, CHUNK * rows.tp / rows.vocab)  # rows of a chunk
    chunked = chunked + np.where(rows.tp > 1, 4 * (rows.head_tokens + at_once) * rows.hidden, 0.0)
    return np.where(rows.kept_logits > 0, whole, chunked)


def loss_gradients(rows: Columns) -> Column:
    """What the chunked loss keeps of a micro-batch until its backward: the gradients of the head and of its input, and
    the stream that the last norm reads."""
    kept = 4 * rows.vocab * rows.hidden / rows.tp + 2 * rows.head_tokens * rows.hidden + message_bytes(rows)
    return np.where(rows.kept_logits > 0, 0.0, kept)


def head_input_bytes(rows: Columns) -> Column:
    """What goes into the head, 16-bit: where ranks share rows out, their own and all of them."""
    split = np.where(rows.sequence_parallel > 0, rows.tp, 1.0)
    gathered = np.where(rows.ours & (rows.cp * split > 1), rows.head_tokens, 0.0)
    return 2 * rows.hidden * (rows.tokens / split + gathered)


def token_bytes(rows: Columns) -> Column:
    """Of this system: tokens and targets (int64) and positions (int32) of a step's global batch, on every rank."""
    return np.where(rows.ours, 20 * rows.seq * rows.micro_batch * rows.micro_batches * rows.dp, 0.0)


def message_bytes(rows: Columns) -> Column:
    """One activation or its gradient on its way between stages: the residual stream."""
    return rows.residual_bytes * rows.tokens * rows.hidden / np.where(rows.sequence_parallel > 0, rows.tp, 1.0)


def deferred_bytes(rows: Columns) -> Column:
    """Bytes of one layer between a split backward's B and W: inputs and output gradients of every product, 16-bit."""
    late = _experts_wait(rows)
    experts = late * rows.experts_per_token * rows.expert_intermediate + rows.shared_intermediate
    middle = (1 - rows.moe) * rows.intermediate + rows.moe * experts
    gradients = rows.query + rows.keys + rows.values + (rows.matrices - 1) * middle
    dense = 2 - rows.moe * (1 - late) * (rows.shared_intermediate == 0) / 2
    outputs = 2 * rows.tokens * (dense * rows.hidden + gradients / rows.tp + rows.latent)
    return deferred_inputs(rows) + outputs + late * _routed_bytes(rows)


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
    return _SUM * expert_parameters(rows) / np.maximum(rows.slow_layers, 1) * (1 - _experts_wait(rows))


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


def forward_bytes(rows: Columns) -> Column:
    """What comes and goes in a layer's forward beside all that it keeps: what its last product gives, 16-bit; where
    ranks add that up, in float32, as it comes in, and the sum."""
    unit = rows.tokens * rows.hidden
    return np.where(rows.ours & (rows.moe == 0) & (rows.tp == 1), 2 * unit, 8 * unit)


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
    return rows.tokens * (whole + inside / rows.tp) + _score_bytes(rows) + _routed_bytes(rows)


def _routed_bytes(rows: Columns) -> Column:
    """Of this system: a token's rows as its experts read them and as they come back, and the router's scores."""
    each = 2 * 2 * rows.experts_per_token * rows.hidden + 4 * rows.experts
    return np.where(rows.ours, rows.moe * rows.tokens * each, 0.0)


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
        "zb-1p": np.ceil(1.2 * p),
        "zb-2p": m,
        "zb-v": p,
        "v-min": np.floor((p + 4) / 3),
        "v-half": np.floor((p + 2) / 2),
        "dualpipe-v": p + 0.5,
    }
    return np.minimum(m, np.choose(rows.schedule.astype(int), [forms[name] for name in SCHEDULES]))
