"""A layout: how the work of a step is laid over the devices; and the batch it must process."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from lockstep.config.parallel import BUCKET_MB
from lockstep.errors import LockstepError
from lockstep.given import instance, whole
from lockstep.plan.shape import ModelShape
from lockstep.quantities import counted

Recompute = Literal["none", "selective", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
SCHEDULES = (
    "gpipe", "1f1b", "interleaved", "zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min", "dualpipe-v"
)  # fmt: skip
"""Schedules that the search considers, in the order of their codes."""
TWO_CHUNKS = ("zb-v", "v-half", "v-min", "dualpipe-v")
"""Schedules whose devices hold two chunks in V placement."""
SPLIT = ("zb-h1", "zb-h2", "zb-1p", "zb-2p", "zb-v", "v-half", "v-min", "dualpipe-v")
"""Schedules whose backward is split: weight gradients are made in steps of their own."""

MOST_TOKENS = 1 << 40
"""Of a step: what the planner counts up to."""
MOST = 1 << 24
"""The largest degree, or other number of a layout."""


@dataclass(frozen=True)
class Batch:
    """``sequences`` of ``seq`` tokens per optimizer step, over all data-parallel ranks."""

    sequences: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.sequences * self.seq


@dataclass(frozen=True)
class Layout:
    """Degrees of the mesh and the choices per layout. ``pp * dp * cp * tp`` devices; ``ep`` divides ``dp * cp``.

    ``fsdp``: what is sharded over ``dp * cp``: 0 nothing, 1 optimizer, 2 gradients too, 3 weights too.
    ``sequence_parallel``: activations between tensor-parallel regions are split over ``tp``.
    ``recompute_layers``: layers of every stage that are recomputed fully where ``recompute`` keeps more.
    ``offload_layers``: layers of every stage, not recomputed, whose activations wait in host memory.
    ``overlap``: gradients are reduced behind the backward of the last micro-batch, ``bucket_mb`` of them (in units of
    2^20 bytes) as one message. ``gradient_groups``: canonical groups of a step's micro-batches (part of the run's
    numerics: ``train.gradient_groups``); 0 = every micro-batch is one. ``layers_per_stage``: empty = even.
    ``recompute_per_stage``, ``offload_per_stage``: instead of ``recompute_layers`` and ``offload_layers``, a number for
    each stage; empty = the same on all.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    fsdp: int = 0
    micro_batch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: Recompute = "none"
    recompute_layers: int = 0
    offload_layers: int = 0
    sequence_parallel: bool = True
    overlap: bool = True
    bucket_mb: int = BUCKET_MB
    gradient_groups: int = 0
    layers_per_stage: tuple[int, ...] = ()
    recompute_per_stage: tuple[int, ...] = ()
    offload_per_stage: tuple[int, ...] = ()

    @property
    def by_stage(self) -> bool:
        """Whether stages differ in what they recompute or offload."""
        return bool(self.recompute_per_stage or self.offload_per_stage)

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Layers that are recomputed fully where ``recompute`` keeps more, of every stage."""
        return self.recompute_per_stage or (self.recompute_layers,) * self.pp

    @property
    def offloaded(self) -> tuple[int, ...]:
        """Layers that are offloaded, of every stage."""
        return self.offload_per_stage or (self.offload_layers,) * self.pp

    @property
    def devices(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    def micro_batches(self, batch: Batch) -> int:
        """Micro-batches of one data-parallel rank in a step."""
        return batch.sequences // (self.dp * self.micro_batch)

    def groups(self, batch: Batch) -> int:
        """Canonical groups of all micro-batches of a step."""
        return self.gradient_groups or max(1, batch.sequences // self.micro_batch)

    def describe(self) -> str:
        """Short text with what differs from 1 or from the default."""
        axes = [f"{k}{getattr(self, k)}" for k in ("pp", "dp", "cp", "tp", "ep") if getattr(self, k) > 1]
        axes += ["rows whole"] if self.tp > 1 and not self.sequence_parallel else []
        parts = [*axes, f"mb{self.micro_batch}"] + ([f"fsdp{self.fsdp}"] if self.fsdp else [])
        if self.pp > 1:
            parts.append(self.schedule + (f" x{self.chunks}" if self.chunks > 1 else ""))
        kinds: list[str] = [] if self.recompute == "none" and any(self.recomputed) else [self.recompute]
        kinds += [_counts(self.recomputed)] if any(self.recomputed) else []
        away = [f"offload {_counts(self.offloaded)}"] if any(self.offloaded) else []
        buckets = [f"buckets of {self.bucket_mb} MB"] if self.bucket_mb != BUCKET_MB else []
        groups = [f"gradient groups {self.gradient_groups}"] if self.gradient_groups else []
        return " ".join([*parts, f"recompute {' + '.join(kinds)}", *away, *buckets, *groups])

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), **{name: list(getattr(self, name)) for name in PER_STAGE}}


PER_STAGE = ("layers_per_stage", "recompute_per_stage", "offload_per_stage")
"""Fields of ``Layout`` with a number for each stage, or none."""


def _counts(by_stage: tuple[int, ...]) -> str:
    """One number if it is that of every stage: ``3 layers``, otherwise ``3/3/1/0 layers``."""
    shown = by_stage if len(set(by_stage)) > 1 else by_stage[:1]
    return counted(shown[0], "layer") if len(shown) == 1 else f"{'/'.join(map(str, shown))} layers"


def check_layout(layout: Layout, shape: ModelShape, batch: Batch, devices: int) -> None:
    """Raise LockstepError if the degrees do not multiply to the devices or do not divide the model or the batch."""
    _check_numbers(layout, shape, batch)
    if layout.devices != devices:
        raise LockstepError(
            f"pp {layout.pp} x dp {layout.dp} x cp {layout.cp} x tp {layout.tp} = {layout.devices} devices, but the "
            f"cluster has {devices}: change one degree so that the product is {devices}."
        )
    problems = (
        (shape.heads % layout.tp, f"tp {layout.tp} does not divide the {shape.heads} attention heads"),
        (layout.pp > shape.layers, f"pp {layout.pp} exceeds the {counted(shape.layers, 'layer')}"),
        (
            (together := layout.recompute_layers + layout.offload_layers) > shape.layers,
            f"recompute_layers {layout.recompute_layers} and offload_layers {layout.offload_layers} are of {together} "
            f"layers, and {shape.name} has {shape.layers}: what is recomputed is not offloaded",
        ),
        (batch.seq % layout.cp, f"cp {layout.cp} does not divide the sequence of {batch.seq}"),
        (
            batch.sequences % (layout.dp * layout.micro_batch),
            f"dp {layout.dp} x micro_batch {layout.micro_batch} does not divide the "
            f"{counted(batch.sequences, 'sequence')}",
        ),
        *_group_problems(layout, batch),
        (layout.ep > 1 and shape.experts % layout.ep, f"ep {layout.ep} does not divide the {shape.experts} experts"),
        (layout.ep > 1 and not shape.experts, f"ep {layout.ep} asks for experts, and {shape.name} has none"),
        (
            (layout.dp * layout.cp) % layout.ep,
            f"ep {layout.ep} does not divide dp x cp = {layout.dp * layout.cp}",
        ),
        (
            layout.layers_per_stage
            and (
                len(layout.layers_per_stage) != layout.pp
                or sum(layout.layers_per_stage) != shape.layers
                or min(layout.layers_per_stage) < 1
            ),
            f"layers_per_stage {layout.layers_per_stage} must be {layout.pp} numbers of at least 1 that sum to "
            f"{shape.layers}",
        ),
        (
            any(len(getattr(layout, name)) not in (0, layout.pp) for name in PER_STAGE),
            f"recompute_per_stage {layout.recompute_per_stage} and offload_per_stage {layout.offload_per_stage} must "
            f"be {layout.pp} numbers each, or empty",
        ),
    )
    for wrong, message in problems:
        if wrong:
            raise LockstepError(f"layout {layout.describe()}: {message}.")


def _group_problems(layout: Layout, batch: Batch) -> tuple[tuple[bool, str], ...]:
    """What is wrong with canonical groups, and the words."""
    each, groups = batch.sequences // layout.micro_batch, layout.groups(batch)
    return (
        (each % groups > 0, f"gradient_groups {groups} does not divide the {counted(each, 'micro-batch')} of a step"),
        (
            layout.fsdp < 2 and groups % layout.dp > 0,
            f"dp {layout.dp} does not divide gradient_groups {groups}, of which each replica takes whole ones",
        ),
    )


_LEAST = ("pp", "dp", "cp", "tp", "ep", "micro_batch", "chunks", "bucket_mb")


def _check_numbers(layout: Layout, shape: ModelShape, batch: Batch) -> None:
    """Raise LockstepError for a field that is out of range by itself, or of another type."""
    instance(layout, Layout, "layout")
    instance(batch, Batch, "batch")
    for name in _LEAST:
        whole(getattr(layout, name), f"layout: {name}", most=MOST)
    for name in ("sequences", "seq"):
        whole(getattr(batch, name), f"batch: {name}", most=MOST_TOKENS)
    if layout.schedule not in SCHEDULES:
        raise LockstepError(f"layout: unknown schedule {layout.schedule!r:.60}: known are {', '.join(SCHEDULES)}.")
    for name in ("sequence_parallel", "overlap"):
        instance(getattr(layout, name), bool, f"layout: {name}")
    if layout.pp == 1 and (layout.chunks > 1 or layout.schedule in TWO_CHUNKS):
        raise LockstepError(
            f"layout: schedule {layout.schedule} with chunks {layout.chunks} needs a pipeline, and pp is 1: set pp to "
            "at least 2, or schedule to 1f1b and chunks to 1."
        )
    chunks = 2 if layout.schedule in TWO_CHUNKS else 1
    if layout.pp > 1 and layout.schedule != "interleaved" and layout.chunks != chunks:
        raise LockstepError(
            f"layout: chunks is {layout.chunks}, but {layout.schedule} has {chunks} per stage: set chunks to {chunks}."
        )
    whole(layout.fsdp, "layout: fsdp", least=0, most=3)
    whole(layout.gradient_groups, "layout: gradient_groups", least=0, most=MOST)
    if layout.recompute not in RECOMPUTE:
        raise LockstepError(f"layout: recompute is {layout.recompute!r}, expected one of {', '.join(RECOMPUTE)}.")
    lists = {name: instance(getattr(layout, name), tuple, f"layout: {name}") for name in PER_STAGE}
    singles = {name: (getattr(layout, name),) for name in ("recompute_layers", "offload_layers")}
    for name, counts in (singles | lists).items():
        for count in counts:
            whole(count, f"layout: {name} (of a model of {counted(shape.layers, 'layer')})", least=0, most=shape.layers)
