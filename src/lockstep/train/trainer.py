"""The trainer: a run in a directory, from configuration to the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

from lockstep.config import Config, save_config
from lockstep.errors import LockstepError
from lockstep.model import Model
from lockstep.parallel.collectives import Mesh, single
from lockstep.parallel.mesh import MeshShape
from lockstep.train.build import Run, build, export
from lockstep.train.checkpoint import checkpoints, remove_unfinished, step_path
from lockstep.train.data import remove_unfinished_data
from lockstep.train.display import Display
from lockstep.train.lock import run_lock
from lockstep.train.loop import Loop
from lockstep.train.metrics import Metrics, Nowhere, Writer
from lockstep.train.module import AnyRun, build_module, check_arguments
from lockstep.train.resolve import resolve
from lockstep.train.resumable import resumable
from lockstep.train.resume import RUN_CONFIG, Position, locate, restore, snapshot
from lockstep.train.signals import stop_on_signal


@dataclass(frozen=True)
class Result:
    """How a run ended. loss: of the last good step, nats per token. stopped_by: the signal, None if it is complete."""

    step: int
    loss: float | None
    checkpoint: Path | None
    export: Path | None
    stopped_by: str | None


class Trainer:
    """One training run in one directory.

    ``Trainer(Config(), "notes.txt", train={"out": "runs/notes", "steps": 100}).fit()``

    config: a `Config`, or a loaded `Model`, which is fine-tuned in place. data: what replaces ``data.sources``, or a
    mapping of keys of that section. sections: keys of sections, by section, ``data`` too. resume: the run's own
    directory or one of its checkpoints, to go on from. allow_changes: resume although the result will not be that of
    one whole run. mesh: this process's rank and its way to the others, where ``parallel`` asks for more than one
    (`lockstep train` starts them; under torchrun `lockstep.train.processes.joined` gives it).

    module: any causal `torch.nn.Module`, trained in place instead of a Lockstep model, under ``train.numerics: fast``.
    Its forward takes tokens, int64 [B, T], and gives logits [B, T, V], or an object that holds them as ``.logits``
    (Hugging Face). T is always ``data.seq_len``: a row holds documents one after the other and is filled up with token
    0, without targets. A forward with a parameter ``position_ids`` is given positions that begin anew with every
    document, by which Hugging Face models keep documents apart; to any other module a row is one text, and a token sees
    the documents before its own. Checkpoints hold trained and frozen parameters and persistent buffers under the
    module's own names. See `docs/compile.md` for the levels.

    The run's directory is locked from here until `fit` ends or `close` is called. Raises `LockstepError` for
    whatever is wrong with configuration, data, directory or checkpoint.
    """

    def __init__(
        self,
        config: Config | Model,
        data: str | Sequence[str] | Mapping[str, Any] | None = None,
        /,
        *,
        resume: str | Path | None = None,
        allow_changes: bool = False,
        display: Display | None = None,
        mesh: Mesh | None = None,
        module: nn.Module | None = None,
        **sections: Any,
    ) -> None:
        self.config, given = resolve(config, data, sections)
        if module is not None:
            check_arguments(self.config, given, module)
        self.out = Path(self.config.train.out).expanduser()
        mesh = mesh or _alone(self.config)
        self.display = display or Display(None if mesh.first else Console(quiet=True))
        self.position = Position()
        self._resumed = False
        start = None if resume is None else resumable(resume)
        with ExitStack() as stack:
            if mesh.first:
                stack.enter_context(run_lock(self.out))
                remove_unfinished(step_path(self.out, 0).parent)
                remove_unfinished_data(self.out / "data")
            stack.enter_context(self.display)
            point = None if start is None else locate(start, self.out)
            how = (self.out, self.display.preparing, point, mesh, self.display.note)
            self.run: AnyRun
            if module is None:
                self.run = build(self.config, given, *how)
            else:
                self.run = build_module(self.config, module, *how)
            if point is not None:
                self.position = restore(self.run, self.config, point, self.out, allow_changes)
                self._resumed = True
            self._held: ExitStack | None = stack.pop_all()

    @property
    def model(self) -> Model:
        """The model in training; its parameters are the float32 masters. A module that was given is none."""
        if not isinstance(self.run, Run):
            raise LockstepError(f"this run trains the module {self.run.title}, in place: use that object itself")
        return self.run.model

    def fit(self) -> Result:
        """Train up to ``train.steps``, then save (and export, if asked). SIGTERM and SIGINT save and return early."""
        first = self.run.mesh.first
        if not self._resumed and first:
            refuse_existing(self.out)
        with self._hold() as held, stop_on_signal() as stop:
            metrics: Writer = Nowhere()
            if first:
                save_config(self.config, self.out / RUN_CONFIG)
                metrics = Metrics(self.out, self.position.step + 1, self.config.train.tensorboard, self.display.note)
            held.callback(metrics.close)
            loop = Loop(self.run, self.config, self.out, self.position, self.display, metrics, stop)
            try:
                checkpoint = loop.train()
            finally:
                self.position, self._resumed = loop.position, True
            done = stop.signal is None
            exported = None
            if isinstance(self.run, Run) and self.config.train.export and done:
                exported = export(self.run, self.config, self.out)
        return Result(self.position.step, self.position.loss, checkpoint, exported, stop.signal)

    def resume(self, directory: str | Path, allow_changes: bool = False) -> None:
        """Go on from a checkpoint, or from the newest one of a run's directory."""
        point = locate(Path(directory).expanduser(), self.out)
        self.position = restore(self.run, self.config, point, self.out, allow_changes)
        self._resumed = True

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds: ``model`` and ``optimizer`` tensors (float32, not copies), and plain documents.

        On a mesh every rank must call it; the first has it all, the others get nothing.
        """
        found = snapshot(self.run, self.config, self.position)
        return {} if found is None else {**found[0], **found[1]}

    def close(self) -> None:
        """Give up the run's directory without training."""
        if self._held is not None:
            self._hold().close()

    def _hold(self) -> ExitStack:
        """What gives the directory back when it is closed: held since the beginning, or taken again."""
        held, self._held = self._held, None
        if held is None:
            held = ExitStack()
            if self.run.mesh.first:
                held.enter_context(run_lock(self.out))
            held.enter_context(self.display)
        return held


def _alone(config: Config) -> Mesh:
    size = MeshShape.of(config.parallel).size
    if size > 1:
        raise LockstepError(
            f"parallel asks for {MeshShape.of(config.parallel).describe()} = {size} processes, and this is one: start "
            "them with `lockstep train` or torchrun"
        )
    return single()


def begun(out: Path) -> bool:
    """Whether a run was started here and died before its first checkpoint."""
    return (out / RUN_CONFIG).exists() and not checkpoints(out)


def refuse_existing(out: Path) -> None:
    """Raise if the directory already holds a run with checkpoints."""
    found = checkpoints(out)
    if found:
        raise LockstepError(
            f"{out} already holds a run (newest checkpoint: {found[-1].name}): continue it with --resume, "
            "or choose another directory with --out"
        )
