"""What a run will do, and what it did, in lines for a person."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from lockstep.config.parallel import ParallelConfig
from lockstep.parallel.mesh import MeshShape
from lockstep.train.trainer import Result, Trainer


def plan_lines(trainer: Trainer) -> Iterator[str]:
    """Parameters, data and steps, before training begins."""
    run, config = trainer.run, trainer.config
    train = config.train
    whole = run.size
    training = sum(p.numel() for p in run.engine.expected()[0].values())
    part = ""
    if config.lora.rank:
        part = f", of which {amount(training)} in adapters train (rank {config.lora.rank})"
    elif training < whole:
        part = f", {whole - training:,} of which do not train"
    yield f"model     {run.title}, {amount(whole)} parameters{part}"
    about, count = run.data.tokens.about, len(run.data.training)
    yield (
        f"data      {', '.join(config.data.sources)}: {amount(about.bytes)}B, {amount(about.tokens)} tokens, "
        f"{count:,} sequences of {config.data.seq_len}, {len(run.data.held_out):,} held out"
    )
    sequences = train.micro_batch * train.micro_batches
    left = train.steps - trainer.position.step
    if left <= 0:
        yield f"training  nothing is left to do: {trainer.position.step} of {train.steps} steps are done"
        return
    yield (
        f"training  steps {trainer.position.step + 1}-{train.steps}: {train.micro_batches} x {train.micro_batch} "
        f"sequences a step, about {amount(left * sequences * config.data.seq_len)} tokens, "
        f"{train.steps * sequences / count:.2f} epochs in all"
    )
    yield f"numbers   {train.dtype} compute, float32 masters, numerics {train.numerics}, seed {train.seed}"
    if run.mesh.shape.size > 1:
        yield f"layout    {layout_line(config.parallel)}"
    yield f"output    {trainer.out}"


def layout_line(parallel: ParallelConfig) -> str:
    """The degrees, and what else of the layout is at work."""
    parts = [MeshShape.of(parallel).describe()]
    if parallel.pp > 1:
        parts.append(parallel.schedule)
    counts = parallel.recompute_per_stage or (parallel.recompute_layers,)
    if parallel.recompute == "full" or any(counts):
        some = "every layer" if parallel.recompute == "full" else f"{'/'.join(map(str, counts))} layers a stage"
        parts.append(f"recomputes {some}")
    away = parallel.offload_per_stage or (parallel.offload_layers,)
    if any(away):
        parts.append(f"offloads {'/'.join(map(str, away))} layers a stage")
    if parallel.sequence_parallel and parallel.tp > 1:
        parts.append("rows shared")
    if parallel.fsdp:
        parts.append(
            f"{('moments', 'moments and gradients', 'moments, gradients and weights')[parallel.fsdp - 1]} sharded"
        )
    return ", ".join(parts)


def result_lines(trainer: Trainer, result: Result) -> Iterator[str]:
    """How the run ended and where its results are."""
    if result.stopped_by is not None:
        yield f"stopped by {result.stopped_by} after step {result.step} of {trainer.config.train.steps}"
        yield f"go on with: lockstep train --out {shlex.quote(str(trainer.out))} --resume"
    else:
        yield f"done: {result.step} steps" + (f", last loss {result.loss:.4f}" if result.loss is not None else "")
    if result.checkpoint is not None:
        yield f"checkpoint {result.checkpoint}"
    if result.export is not None:
        yield f"export     {result.export}"


def amount(number: float) -> str:
    """A count in three or four figures: 512, 80.3 k, 5.48 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:g}"
