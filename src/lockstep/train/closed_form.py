"""What is said of a rank that cannot be gone through: the planner's closed form of its memory, and why."""

from __future__ import annotations

import json
from pathlib import Path

from lockstep.config import Config, ModelConfig
from lockstep.errors import NotRunError
from lockstep.plan import Batch, Layout, ModelShape, load_plan, rank_memory
from lockstep.plan.decoder_config import planner_shape
from lockstep.plan.layout import SCHEDULES, TWO_CHUNKS
from lockstep.train.dryrun_report import shares

Asked = tuple[ModelShape, Layout, Batch]


def of_plan(file: Path) -> Asked:
    """The plan's own."""
    plan = load_plan(file)
    return plan.model, plan.layout, plan.batch


def of_config(config: Config, shape: ModelConfig, why: NotRunError) -> Asked:
    """The layout of a run. Raises ``why`` again for a table in a file, which the closed form does not count."""
    parallel, train = config.parallel, config.train
    if parallel.schedule not in SCHEDULES:
        raise why
    two = parallel.pp > 1 and parallel.schedule in (*TWO_CHUNKS, "interleaved")
    layout = Layout(
        **{key: getattr(parallel, key) for key in ("pp", "dp", "cp", "tp", "ep", "fsdp", "recompute")},
        micro_batch=train.micro_batch,
        # Without a pipeline chunks follow one another as they would as one.
        schedule=parallel.schedule if parallel.pp > 1 or parallel.schedule == "gpipe" else "1f1b",
        chunks=parallel.chunks or 2 if two else 1,
        recompute_layers=parallel.recompute_layers,
        offload_layers=parallel.offload_layers,
        gradient_groups=train.gradient_groups or 0,
        sequence_parallel=parallel.sequence_parallel,
        layers_per_stage=parallel.layers_per_stage,
        recompute_per_stage=parallel.recompute_per_stage,
        offload_per_stage=parallel.offload_per_stage,
    )
    return planner_shape(shape), layout, Batch(train.micro_batch * train.micro_batches, config.data.seq_len)


def closed_form(why: NotRunError, asked: Asked, rank: int, as_json: bool = False) -> str:
    """What `lockstep dryrun` prints instead of a run. Raises LockstepError for a rank or a layout that cannot be."""
    shape, layout, batch = asked
    found = rank_memory(shape, layout, batch, rank)
    moment = {name: int(value) for name, value in found.moments[found.peak_step].items() if value}
    fixed = {name: int(value) for name, value in found.fixed.items()}
    if as_json:
        content = {"not_run": str(why), "rank": rank, "fixed": fixed, "peak": int(found.peak), "moment": moment}
        return json.dumps(content | {"step": found.peak_name}, indent=1)
    return "\n".join([
        f"closed form only, no operator was gone through: {why}",
        f"rank {rank} of {layout.describe()}",
        f"all the time  {shares(fixed)}",
        f"peak          {found.peak / 1e9:.4g} GB with a margin for fragmentation, in {found.peak_name}",
        f"at the peak   {shares(moment)}",
    ])  # fmt: skip
