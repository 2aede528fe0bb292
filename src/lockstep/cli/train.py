"""`lockstep train`: a run from a configuration, or one that goes on."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli.imports import heavy_imports
from lockstep.config import Config, load_config, save_config
from lockstep.parallel.launch import is_rank, launch
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.rules import check_run
from lockstep.train.resumable import resumable

if TYPE_CHECKING:
    from lockstep.parallel.collectives import Mesh


def train(
    file: Annotated[Path | None, typer.Argument(metavar="[CONFIG.yaml]", help="The run's configuration.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE over the file; repeatable.")] = None,
    model: Annotated[str | None, typer.Option(help="A model to fine-tune: a directory, a GGUF file, an alias.")] = None,
    data: Annotated[list[str] | None, typer.Option(help="Text, folder, .jsonl, hf:NAME or stdlib; repeatable.")] = None,
    out: Annotated[str | None, typer.Option(help="The run's directory.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps in the whole run.")] = None,
    lora_rank: Annotated[int | None, typer.Option(help="Train adapters of this rank instead of the model.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A layout from `lockstep plan`: plan.yaml.")] = None,
    level: Annotated[
        str | None,
        typer.Option("--compile.level", help="O0, O1 or O2: how steps are run; never a changed bit.  [default: auto]"),
    ] = None,
    disable_pass: Annotated[
        list[str] | None, typer.Option("--compile.disable-pass", help="A pass to leave out; repeatable.")
    ] = None,
    only_pass: Annotated[
        list[str] | None, typer.Option("--compile.only-pass", help="A pass to run and no other; repeatable.")
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Tell what the compiler did, and write the graphs to OUT/compile.html.")
    ] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in --out.")] = False,
    resume_from: Annotated[Path | None, typer.Option(help="Go on from this checkpoint.")] = None,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume although the result will not be that of one whole run.")
    ] = False,
) -> int:
    """Train or fine-tune a model on text; a stopped run goes on bit for bit with --resume."""
    options = {"model": model, "train.out": out, "train.steps": steps, "lora.rank": lora_rank, "compile.level": level}
    overrides = [*(set_ or []), *(f"{key}={value}" for key, value in options.items() if value is not None)]
    lists = {"data.sources": data, "compile.disable_pass": disable_pass, "compile.only_pass": only_pass}
    overrides += [f"{key}={_yaml_list(values)}" for key, values in lists.items() if values]
    overrides += ["compile.explain=true"] if explain else []
    config = _configuration(file, overrides, out, resume, resume_from)
    if plan is not None:
        from lockstep.train.planned import planned

        config = planned(config, plan)
    shape = MeshShape.of(config.parallel)
    if is_rank():
        with heavy_imports():
            from lockstep.parallel.join import joined

        with joined(shape) as mesh:
            _run(config, resume, resume_from, allow_changes, mesh)
        return 0
    check_run(config)
    if shape.size > 1:
        if resume or resume_from is not None:  # the ranks would find it out, once all of them have begun
            resumable(resume_from or config.train.out)
        return _launch(config, shape, resume, resume_from, allow_changes)
    _run(config, resume, resume_from, allow_changes, None)
    return 0


def _run(config: Config, resume: bool, resume_from: Path | None, allow_changes: bool, mesh: Mesh | None) -> None:
    with heavy_imports():
        from lockstep.train.lock import run_lock
        from lockstep.train.report import plan_lines, result_lines
        from lockstep.train.trainer import Trainer, begun, refuse_existing

    first = mesh is None or mesh.first
    directory = Path(config.train.out).expanduser()
    point = resume_from
    if resume and resume_from is None and not begun(directory):
        point = directory
    elif resume_from is None and directory.exists() and first:
        with run_lock(directory):  # told first if another trainer is at work there
            refuse_existing(directory)
    trainer = Trainer(config, resume=point, allow_changes=allow_changes, mesh=mesh)
    if resume and point is None:
        trainer.display.note(f"{directory} has no checkpoint yet: the run begins again at its first step")
    for line in plan_lines(trainer):
        trainer.display.note(line)
    for line in result_lines(trainer, trainer.fit()):
        if first:
            typer.echo(line)


def _launch(config: Config, shape: MeshShape, resume: bool, resume_from: Path | None, allow_changes: bool) -> int:
    """Start the ranks, which read this very configuration."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        file = Path(folder) / "config.yaml"
        save_config(config, file)
        command = [
            "train",
            str(file),
            *(["--resume"] if resume else []),
            *(["--allow-changes"] if allow_changes else []),
        ]
        command += [] if resume_from is None else ["--resume-from", str(resume_from)]
        return launch(command, shape)


def _configuration(
    file: Path | None, overrides: list[str], out: str | None, resume: bool, resume_from: Path | None
) -> Config:
    """The given configuration; a run that is resumed without a file has its own, saved beside its checkpoints."""
    if file is None and resume_from is not None and resume_from.is_dir():
        file = resume_from / "config.yaml"
    elif file is None and resume:
        own = Path(out or load_config(None, overrides).train.out).expanduser() / "config.yaml"
        file = own if own.exists() else None
    return load_config(file, overrides)


def _yaml_list(values: list[str]) -> str:
    import json

    return json.dumps(values)
