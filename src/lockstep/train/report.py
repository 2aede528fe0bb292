"""What a run will do, and what it did, in lines for a person."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.train.trainer import Result, Trainer


def plan_lines(trainer: Trainer) -> Iterator[str]:
    """Parameters, data and steps, before training begins."""
    run, config = trainer.run, trainer.config
    train, decoder = config.train, run.model.decoder
    everything = sum(p.numel() for p in decoder.parameters())
    training = sum(p.numel() for p in run.parameters.values())
    what = f"{everything / 1e6:.2f} M parameters"
    yield f"model     {run.model.config.family}, " + (
        what
        if training == everything
        else f"{what}, of which {training / 1e6:.2f} M adapters train (rank {config.lora.rank})"
    )
    about, count = run.data.tokens.about, len(run.data.training)
    yield (
        f"data      {', '.join(config.data.sources)}: {about.bytes / 1e6:.1f} MB, {about.tokens / 1e6:.2f} M tokens, "
        f"{count:,} sequences of {config.data.seq_len}, {len(run.data.held_out):,} held out"
    )
    sequences = train.micro_batch * train.micro_batches
    left = train.steps - trainer.position.step
    if left <= 0:
        yield f"training  nothing is left to do: {trainer.position.step} of {train.steps} steps are done"
        return
    yield (
        f"training  steps {trainer.position.step + 1}-{train.steps}: {train.micro_batches} x {train.micro_batch} "
        f"sequences a step, about {left * sequences * config.data.seq_len / 1e6:.2f} M tokens, "
        f"{train.steps * sequences / count:.2f} epochs in all"
    )
    yield f"numbers   {train.dtype} compute, float32 masters, numerics {train.numerics}, seed {train.seed}"
    yield f"output    {trainer.out}"


def result_lines(trainer: Trainer, result: Result) -> Iterator[str]:
    """How the run ended and where its results are."""
    if result.stopped_by is not None:
        yield f"stopped by {result.stopped_by} after step {result.step} of {trainer.config.train.steps}"
        yield f"go on with: lockstep train --out {trainer.out} --resume"
    else:
        yield f"done: {result.step} steps" + (f", last loss {result.loss:.4f}" if result.loss is not None else "")
    if result.checkpoint is not None:
        yield f"checkpoint {result.checkpoint}"
    if result.export is not None:
        yield f"export     {result.export}"
