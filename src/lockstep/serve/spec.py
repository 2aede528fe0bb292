"""The engine that the `serve` section of a configuration describes."""

from __future__ import annotations

from typing import Literal

from lockstep.config.serve import ServeConfig, byte_count
from lockstep.serve.wire import EngineSpec


def engine_spec(
    model: str,
    config: ServeConfig,
    dtype: Literal["bfloat16", "float32"] = "bfloat16",
    numerics: Literal["bitwise", "fast"] = "bitwise",
    log_level: str = "info",
) -> EngineSpec:
    """One replica's, as its process is told. model: what `lockstep.load` takes."""
    return EngineSpec(
        model=model,
        dtype=dtype,
        numerics=numerics,
        kv_memory=byte_count(config.kv_memory),
        kv_dtype=config.kv_dtype,
        max_batch_tokens=config.max_batch_tokens,
        step_seconds=config.step_seconds,
        level=config.level,
        max_running=config.max_running,
        max_queue=config.max_queue,
        prefix_cache=config.prefix_cache,
        drafts=config.drafts,
        draft_model=config.draft_model,
        shares=config.shares,
        tp=config.tp,
        weight_cache=byte_count(config.weight_cache),
        structure_seconds=config.structure_seconds,
        log_level=log_level,
    )
