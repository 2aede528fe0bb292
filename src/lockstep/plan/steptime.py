"""Time of a training step in closed form: stages, bubble, communication per axis, optimizer. All rows at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lockstep.plan.buckets import exposed_in_buckets
from lockstep.plan.cluster import Cluster
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.collectives import all_gather, all_reduce, all_to_all, transfer
from lockstep.plan.columns import Column, Columns
from lockstep.plan.compute import LayerTime, head_time, layer_time, stream_time
from lockstep.plan.gradient_bytes import unit_bytes
from lockstep.plan.kept_bytes import plain_layer_bytes
from lockstep.plan.layout import SCHEDULES
from lockstep.plan.loss_bytes import CHUNK
from lockstep.plan.parameters import dense_parameters, expert_parameters, sharded_parameters

_HOST_MICRO_BATCH_S, _HOST_STEP_S = 1e-3, 5e-3
"""Time of the framework's Python per micro-batch and per step that hides behind nothing."""
_OPTIMIZER_BYTES = 30.0
"""Traffic of the optimizer per parameter: float32 gradient, weight and two moments read, three written, 16-bit copy."""
_SHARPNESS = 3.0
"""Host and device run side by side: the time of both is this power mean, near the larger of the two."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step and its parts, shape ``[rows]`` each; the parts of ``step`` sum to it.

    ``compute``: the slowest stage's own work. ``exposed_*``: communication that nothing hides, per axis.
    ``forward``, ``input_gradient`` (with what is recomputed), ``weight_gradient``: one micro-batch on a middle
    stage, communication included; ``slowest`` the whole micro-batch on the slowest stage; ``hop`` one transfer.
    """

    step: Column
    compute: Column
    bubble: Column
    exposed_tp: Column
    exposed_cp: Column
    exposed_ep: Column
    exposed_pp: Column
    exposed_dp: Column
    exposed_offload: Column
    optimizer: Column
    host: Column
    forward: Column
    input_gradient: Column
    weight_gradient: Column
    slowest: Column
    head: Column
    hop: Column


@dataclass(frozen=True)
class _Exposed:
    """Exposed communication of one layer and micro-batch."""

    tp: Column
    cp: Column
    ep: Column
    fsdp: Column
    offload: Column

    @property
    def total(self) -> Column:
        return self.tp + self.cp + self.ep + self.fsdp + self.offload


def step_time(
    rows: Columns, cluster: Cluster, factors: Coefficients, dtype: str = "bf16", layer_factor: Column | None = None
) -> StepTime:
    """Step time of every row on the cluster. ``layer_factor``: instead of looking up ``factors.layer``."""
    layer = layer_time(rows, cluster.device, factors, dtype)
    exposed = _layer_communication(rows, layer, cluster, factors)
    scale = factors.layer_factor(rows) if layer_factor is None else layer_factor
    work = scale * (layer.device**_SHARPNESS + layer.host**_SHARPNESS) ** (1 / _SHARPNESS)
    busy = work + scale * exposed.total
    host = _HOST_MICRO_BATCH_S * factors.micro_batch
    shared = vocabulary_sums(rows, cluster, factors)
    head = head_time(rows, cluster.device, factors, dtype) + shared
    even = rows.layers / rows.pp
    last = rows.last_layers * busy + head + host
    slowest = np.maximum(last, rows.slow_layers * busy + host)
    layers = np.where(slowest > last, rows.slow_layers, rows.last_layers)
    parts = _stage(layer, even * busy + host)
    hop, exposed_pp = _pipeline_transfers(rows, cluster, factors)
    bubble = _bubble(rows, *parts)
    m = rows.micro_batches
    reduction = _gradient_reduction(rows, slowest, cluster, factors)
    traffic = sharded_parameters(rows, 1) * _OPTIMIZER_BYTES * factors.optimizer
    optimizer = stream_time(traffic, cluster.device, factors)
    shared = np.where(slowest > last, 0.0, shared)  # what of them the slowest stage waits for
    compute = m * (slowest - layers * scale * exposed.total - host - shared)
    hosts = m * host + _HOST_STEP_S * factors.step
    each = m * layers * scale
    exposed_dp = reduction + each * exposed.fsdp
    exposed_tp = each * exposed.tp + m * shared
    axes = exposed_tp + each * (exposed.cp + exposed.ep + exposed.offload)
    return StepTime(
        step=compute + bubble + axes + exposed_pp + exposed_dp + optimizer + hosts,
        compute=compute,
        bubble=bubble,
        exposed_tp=exposed_tp,
        exposed_cp=each * exposed.cp,
        exposed_ep=each * exposed.ep,
        exposed_pp=exposed_pp,
        exposed_dp=exposed_dp,
        exposed_offload=each * exposed.offload,
        optimizer=optimizer,
        host=hosts,
        forward=parts[0],
        input_gradient=parts[1],
        weight_gradient=parts[2],
        slowest=slowest,
        head=head,
        hop=hop,
    )


def vocabulary_sums(rows: Columns, cluster: Cluster, factors: Coefficients) -> Column:
    """Seconds of a micro-batch in which the last stage's tensor ranks of this system sum the float32 gradient of the
    head's input, where it is the only stage also the rows of the embedding, and tell each other log-sum-exps, some rows
    at a time."""
    size = rows.head_tokens * rows.hidden * 2
    embedded = np.where(rows.pp > 1, 1.5, 2.5)
    chunks = np.ceil(rows.head_tokens * rows.vocab / rows.tp / CHUNK)
    told = chunks * all_gather(8 * rows.tp * rows.head_tokens / chunks, rows.tp, 1.0, cluster, factors)
    return np.where(rows.ours, embedded * all_reduce(size, rows.tp, 1.0, cluster, factors) + told, 0.0)


def _layer_communication(rows: Columns, layer: LayerTime, cluster: Cluster, factors: Coefficients) -> _Exposed:
    size = rows.tokens * rows.hidden * 2
    again = rows.full
    # Two sums forward and two backward per layer; recomputation repeats the forward ones (arXiv 1909.08053). With
    # sequence parallelism each is a reduce-scatter and an all-gather: the same bytes. This system adds float32 and
    # gathers the rounded sums (6 bytes where a 16-bit ring moves 4), and sums the input's gradient of each of query,
    # key, value, gate and up by itself. With sequence parallelism those sums are not gathered, but the backward
    # gathers the gradients of both branches, and once more their inputs.
    shared = rows.ours & (rows.sequence_parallel > 0)
    plain = np.where(rows.ours, 1.5 * (4 + rows.matrices), 4.0)
    sums, repeated = np.where(shared, 7 + rows.matrices, plain), np.where(rows.ours, 3.0, 2.0)
    tp = (sums + repeated * again) * all_reduce(size, rows.tp, 1.0, cluster, factors)
    block = rows.tokens * (rows.keys + rows.values) / rows.tp * 2
    ring = (rows.cp - 1) * transfer(block, rows.tp, cluster, factors) * (rows.cp > 1)
    # The ring hides behind the blocks of attention it feeds; the backward moves keys, values and their gradients.
    cp = (1 + again) * np.maximum(0.0, ring - layer.attention) + np.maximum(0.0, 2 * ring - 2.5 * layer.attention)
    # This system exchanges rows for heads, forward and backward, and hands each weight's gradient on, in float32, from
    # rank to rank and the sum back to all: four of attention, those of the MLP, two norms. In a compiled
    # step a rank makes its own from that of the rank before, where it stands: the ranks take turns.
    width = (rows.query + rows.keys + rows.values + rows.core) / rows.tp
    swapped = (2 + again) * all_to_all(rows.tokens * width * 2, rows.cp, rows.tp, cluster, factors)
    values = rows.matrices + 6
    handed = rows.cp * values * transfer(unit_bytes(rows)[0] / values, rows.tp, cluster, factors) * (rows.cp > 1)
    cp = np.where(rows.ours, swapped + handed + (rows.cp - 1) * layer.weight_gradient, cp)
    routed = size * rows.experts_per_token
    ep = rows.moe * (4 + 2 * again) * all_to_all(routed, rows.ep, rows.tp, cluster, factors)
    group, layers = rows.sharing, np.maximum(rows.slow_layers, 1)
    gather = all_gather(dense_parameters(rows) / layers * 2, group, rows.tp, cluster, factors)
    gather = gather + all_gather(
        expert_parameters(rows) / layers * 2, _copies(rows), rows.tp * rows.ep, cluster, factors
    )
    fsdp = _hidden(gather, layer.forward) + _hidden(2 * gather, layer.device - layer.forward)
    # Gradients sharded (level 2) but not weights: one reduce-scatter per micro-batch behind the backward.
    scatter = _hidden(gather, layer.device - layer.forward)
    # In this system both travel in float32, and stand between the layers.
    fsdp, scatter = np.where(rows.ours, 6 * gather, fsdp), np.where(rows.ours, 2 * gather, scatter)
    shard = np.where(rows.fsdp >= 3, fsdp, np.where(rows.fsdp == 2, scatter, 0.0))
    offload = rows.offload_layers / layers * exposed_offload(rows, layer, cluster)
    return _Exposed(tp, cp, ep, np.where(group > 1, shard, 0.0), offload)


def exposed_offload(rows: Columns, layer: LayerTime, cluster: Cluster) -> Column:
    """Seconds that a layer's offload adds to a micro-batch. Its activations leave during the forward and return during
    the backward of another micro-batch, where copies run beside the computation."""
    away = plain_layer_bytes(rows) / (cluster.device.host_gb_s * 1e9)
    hidden = (
        layer.forward * rows.slow_layers / np.maximum(rows.offload_layers, 1) if cluster.device.copies_hide else 0.0
    )
    exposed: Column = 2 * np.maximum(0.0, away - hidden)
    return exposed


def _copies(rows: Columns) -> Column:
    """Data ranks that have the same experts."""
    return np.maximum(1.0, rows.dp * rows.cp / rows.ep)


def _hidden(communication: Column, work: Column) -> Column:
    """What is left of a communication that runs beside ``work``; a tenth of it stands before or after the work."""
    return np.maximum(0.1 * communication, communication - work)


def _stage(layer: LayerTime, busy: Column) -> tuple[Column, Column, Column]:
    """Forward, input gradient with recomputation, weight gradient of a middle stage that is busy so long."""
    unit = busy / layer.device
    return layer.forward * unit, (layer.again + layer.input_gradient) * unit, layer.weight_gradient * unit


def _pipeline_transfers(rows: Columns, cluster: Cluster, factors: Coefficients) -> tuple[Column, Column]:
    """One transfer between stages, and all that a step waits for: two per micro-batch on the critical path."""
    size = rows.tokens * rows.hidden * rows.residual_bytes / np.where(rows.sequence_parallel > 0, rows.tp, 1.0)
    hop = transfer(size, rows.tp * rows.cp * rows.dp, cluster, factors) * (rows.pp > 1)
    return hop, 2 * hop * ((rows.micro_batches - 1) * rows.chunks + rows.pp - 1)


def _bubble(rows: Columns, f: Column, b: Column, w: Column) -> Column:
    """Step time beyond the slowest stage's own work: closed forms of the schedules for equal stages.

    arXiv 2104.04473, 2401.10241 (ZB-H2 with its ramp, which a step that starts on all devices at once pays),
    2405.15362, 2412.19437. The finalists of a search are simulated instead.
    """
    p = rows.pp - 1
    uneven = np.abs(f - b) + np.abs(b - w)  # V schedules are tight only for F = B = W; slopes from the simulator
    dualpipe = p * np.maximum(0.0, f + 2 * (b + w) - 3 * w + f - b) / 2
    forms = {
        "gpipe": p * (f + b + w),
        "1f1b": p * (f + b + w),
        "interleaved": p * (f + b + w) / rows.chunks,
        "zb-h1": p * np.maximum(f, f + b - w),
        "zb-h2": p * np.maximum(f, f + b - 2 * w),
        "zb-1p": p * (f + b + w) * 0.42,
        "zb-2p": p * (f + b + w) * 0.32,
        "zb-v": p * 1.25 * uneven,
        "v-half": p * (0.42 * (f + b + w) + 1.1 * uneven),
        "v-min": p * (0.65 * (f + b + w) + 4.7 * uneven),
        "dualpipe-v": dualpipe,
    }
    return np.choose(rows.schedule.astype(int), [forms[name] for name in SCHEDULES])


def _gradient_reduction(rows: Columns, slowest: Column, cluster: Cluster, factors: Coefficients) -> Column:
    """Exposed time of the reduction over data ranks and of tied embeddings over the first and last stage."""
    group, stride = rows.sharing, rows.tp * np.where(rows.ours, rows.cp, 1.0)
    each = np.where(rows.ours, 4.0, 2.0) * factors.gradient  # bytes: this system sends float32
    reduce = all_reduce(dense_parameters(rows) * each, group, stride, cluster, factors)
    reduce = reduce + all_reduce(expert_parameters(rows) * each, _copies(rows), stride * rows.ep, cluster, factors)
    latency = all_reduce(0.0, group, stride, cluster, factors)
    # Levels 2 and 3 reduce inside the micro-batches; level 2 gathers the new weights once. This system gathers last,
    # when nothing is left to compute beside it: the sums, or at levels 1 and 2 the new weights.
    half = np.where(rows.fsdp == 3, 0.0, reduce / 2)
    last = np.where(rows.ours, half, 0.0)
    first = np.where(rows.fsdp < 2, reduce, half) - last
    work = slowest * 2 / 3  # of a micro-batch, the backward
    late = np.where(rows.fsdp < 2, exposed_in_buckets(rows, first, latency, work), _hidden(first, work))
    exposed = np.where(rows.overlap > 0, late, first) + last
    words = rows.vocab * rows.hidden / rows.tp * 2
    pair = np.where(rows.pp > 1, 2.0, 1.0)
    distance = np.minimum(rows.tp * rows.cp * rows.dp, cluster.node)
    return exposed + rows.tied * all_reduce(words, pair, distance, cluster, factors)
