"""Many layouts at once: every number of a model and its layout as a column, so that formulas run on all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lockstep.config.parallel import BUCKET_MB
from lockstep.plan.layout import RECOMPUTE, SCHEDULES, TWO_CHUNKS, Batch, Layout
from lockstep.plan.shape import ModelShape

Column = NDArray[np.float64]


@dataclass(frozen=True)
class Columns:
    """One row per (model, layout, batch); all columns float64 of the same length. Flags are 0 or 1.

    ``recompute`` and ``schedule`` are positions in ``layout.RECOMPUTE`` and ``layout.SCHEDULES``; ``moe`` is the
    fraction of layers with experts, ``matrices`` the number of matrices in an MLP; ``slow_layers`` and
    ``last_layers`` the layers of the fullest and of the last stage.
    """

    layers: Column
    hidden: Column
    heads: Column
    kv_heads: Column
    head_dim: Column
    value_dim: Column
    latent: Column
    q_lora_rank: Column
    kv_lora_rank: Column
    qk_nope_head_dim: Column
    latent_parameters: Column
    head_parameters: Column
    intermediate: Column
    matrices: Column
    vocab: Column
    tied: Column
    positions: Column
    dropout: Column
    unfused: Column
    kept_logits: Column
    mixed: Column
    residual_bytes: Column
    experts: Column
    experts_per_token: Column
    expert_intermediate: Column
    shared_intermediate: Column
    moe: Column
    seq: Column
    pp: Column
    dp: Column
    cp: Column
    tp: Column
    ep: Column
    fsdp: Column
    micro_batch: Column
    micro_batches: Column
    schedule: Column
    chunks: Column
    recompute: Column
    recompute_layers: Column
    offload_layers: Column
    sequence_parallel: Column
    overlap: Column
    bucket_mb: Column
    gradient_groups: Column
    slow_layers: Column
    last_layers: Column

    def __len__(self) -> int:
        return len(self.layers)

    def take(self, index: Any) -> Columns:
        """The rows that ``index`` (positions or a mask) selects."""
        return Columns(**{field.name: getattr(self, field.name)[index] for field in fields(self)})

    @cached_property
    def tokens(self) -> Column:
        """Tokens of one micro-batch on one rank."""
        return self.micro_batch * self.seq / self.cp

    @cached_property
    def ours(self) -> NDArray[np.bool_]:
        """Whether parallelism is as this system's trainer runs it."""
        return self.mixed == 0

    @cached_property
    def sharing(self) -> Column:
        """Ranks that share out the optimizer, gradients and weights: those of cp too, but not in this system."""
        return self.dp * np.where(self.ours, 1.0, self.cp)

    @cached_property
    def head_tokens(self) -> Column:
        """Tokens of one micro-batch whose loss a rank computes: in this system all, on every rank of cp."""
        return self.tokens * np.where(self.ours, self.cp, 1.0)

    @cached_property
    def group_size(self) -> Column:
        """Micro-batches of a canonical group."""
        each = self.micro_batches * self.dp
        return np.where(self.gradient_groups > 0, each / np.maximum(self.gradient_groups, 1.0), 1.0)

    @cached_property
    def folded(self) -> NDArray[np.bool_]:
        """Whether the schedule places its stages in a V: the first device has the last layers too."""
        return np.isin(self.schedule, [SCHEDULES.index(name) for name in TWO_CHUNKS])

    @cached_property
    def full(self) -> Column:
        """Fraction of a stage's layers whose activations are recomputed from the layer's input."""
        return np.where(self.recompute == 2, 1.0, np.minimum(1.0, self.recompute_layers / self.slow_layers))

    @cached_property
    def query(self) -> Column:
        """Width of all query heads."""
        return self.heads * self.head_dim

    @cached_property
    def keys(self) -> Column:
        """Width of all key heads."""
        return self.kv_heads * self.head_dim

    @cached_property
    def values(self) -> Column:
        """Width of all value heads."""
        return self.kv_heads * self.value_dim

    @cached_property
    def core(self) -> Column:
        """Width of what attention puts out, all heads."""
        return self.heads * self.value_dim


def columns(shape: ModelShape, layouts: Mapping[str, Any], batch: Batch) -> Columns:
    """Rows of one model: ``layouts`` gives arrays by the names of ``Layout`` (degrees, codes and flags)."""
    length = max(np.size(value) for value in layouts.values())

    def full(value: Any) -> Column:
        return np.broadcast_to(np.asarray(value, dtype=np.float64), (length,))

    given = {name: full(layouts.get(name, default)) for name, default in _DEFAULTS.items()}
    stages = given["pp"] * given["chunks"]
    even = np.ceil(shape.layers / stages) * given["chunks"]
    left = np.where(shape.layers % stages == 0, even, np.floor(shape.layers / stages) * given["chunks"])
    moe = (shape.layers - shape.dense_layers) / shape.layers if shape.experts else 0.0
    sizes = {name: full(getattr(shape, name)) for name in _SIZES}
    return Columns(
        **sizes,
        **given,
        matrices=full(3 if shape.gated else 2),
        unfused=full(shape.attention == "unfused"),
        kept_logits=full(shape.logits == "kept"),
        mixed=full(shape.states == "mixed"),
        moe=full(moe),
        seq=full(batch.seq),
        micro_batches=full(np.maximum(1, batch.sequences // (given["dp"] * given["micro_batch"]))),
        slow_layers=full(layouts.get("slow_layers", even)),
        last_layers=full(layouts.get("last_layers", np.minimum(even, left))),
    )


def layout_columns(shape: ModelShape, layouts: Sequence[Layout], batch: Batch) -> Columns:
    """Rows of one model from ``Layout`` values."""
    table: dict[str, Any] = {name: [float(getattr(x, name)) for x in layouts] for name in _NUMBERS}
    table["schedule"] = [SCHEDULES.index(x.schedule) for x in layouts]
    table["recompute"] = [RECOMPUTE.index(x.recompute) for x in layouts]
    table["sequence_parallel"] = [x.sequence_parallel for x in layouts]
    table["overlap"] = [x.overlap for x in layouts]
    rows = columns(shape, {name: np.asarray(value, dtype=np.float64) for name, value in table.items()}, batch)
    slow, last = rows.slow_layers.copy(), rows.last_layers.copy()
    for i, layout in enumerate(layouts):
        if layout.layers_per_stage:
            slow[i], last[i] = max(layout.layers_per_stage), layout.layers_per_stage[-1]
    return Columns(**{**_as_dict(rows), "slow_layers": slow, "last_layers": last})


def join(parts: Sequence[Columns]) -> Columns:
    """Rows of several tables, one after the other."""
    return Columns(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Columns)})


def _as_dict(rows: Columns) -> dict[str, Column]:
    return {field.name: getattr(rows, field.name) for field in fields(rows)}


_NUMBERS = (
    "pp", "dp", "cp", "tp", "ep", "fsdp", "micro_batch", "chunks", "recompute_layers", "offload_layers", "bucket_mb",
    "gradient_groups",
)  # fmt: skip
_DEFAULTS = {
    **dict.fromkeys(_NUMBERS, 1.0),
    "fsdp": 0.0,
    "recompute_layers": 0.0,
    "offload_layers": 0.0,
    "schedule": float(SCHEDULES.index("1f1b")),
    "recompute": 0.0,
    "sequence_parallel": 1.0,
    "overlap": 1.0,
    "bucket_mb": float(BUCKET_MB),
    "gradient_groups": 0.0,
}
_SIZES = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "value_dim", "latent", "q_lora_rank", "kv_lora_rank",
    "qk_nope_head_dim", "latent_parameters", "head_parameters", "intermediate", "vocab", "tied",
    "residual_bytes", "positions", "dropout", "experts", "experts_per_token", "expert_intermediate",
    "shared_intermediate",
)  # fmt: skip
