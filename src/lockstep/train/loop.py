"""The loop: global batch, gradient, update, and what happens now and then around it."""

from __future__ import annotations

import math
import time
from pathlib import Path

from lockstep.config import Config
from lockstep.errors import LockstepError
from lockstep.train.checkpoint import newest_whole, step_path
from lockstep.train.display import Display, StepLine
from lockstep.train.metrics import Writer
from lockstep.train.module import AnyRun
from lockstep.train.optimizer import clip_scale
from lockstep.train.resume import Position, save
from lockstep.train.schedule import lr_factor
from lockstep.train.signals import StopRequest
from lockstep.train.speed import Speed
from lockstep.train.step import StepGradient


class Loop:
    """Trains a run from a position to the last step."""

    def __init__(
        self,
        run: AnyRun,
        config: Config,
        out: Path,
        position: Position,
        display: Display,
        metrics: Writer,
        stop: StopRequest,
    ) -> None:
        self.run, self.config, self.out, self.position = run, config, out, position
        self.display, self.metrics, self.stop = display, metrics, stop
        self._speed = Speed(config.train, run.mesh.shape.size if run.mesh.first else 0)
        self._saved = position.step if step_path(out, position.step).exists() else None

    def train(self) -> Path | None:
        """Run until the last step or until asked to stop, then save. Returns the checkpoint.

        Raises `LockstepError` after ``max_bad_steps`` bad steps in a row, and when the last save fails.
        """
        train = self.config.train
        while self.position.step < train.steps and not self.run.engine.stopping(self.stop):
            if not self._advance():
                break
            if self._due(train.eval_every) or (train.eval_every and self.position.step == train.steps):
                self._evaluate()
            if self._due(train.save_every) and self.position.step < train.steps:
                self._save_and_go_on()
        if self.position.bad:
            self.display.note("no checkpoint is written: the last step was bad, the last saved one is good")
            return newest_whole(self.out)
        return step_path(self.out, self.position.step) if self._saved == self.position.step else self._save()

    def _advance(self) -> bool:
        """One global batch. False if it was abandoned, with nothing changed, because somebody asked to stop."""
        train, run = self.config.train, self.run
        began = time.perf_counter()
        batches = run.data.global_batch(self.position.step, train.micro_batch, train.micro_batches)
        found = run.engine.gradient(batches, train.z_loss, lambda: bool(self.stop))
        if found is None:
            return False
        norm = run.engine.norm(found)
        lr = self.config.optimizer.lr * lr_factor(self.config.schedule, self.position.step, train.steps)
        tokens = sum(len(b.tokens) for b in batches)
        good = math.isfinite(found.objective) and math.isfinite(norm)
        if good:
            run.engine.update(found, lr, clip_scale(norm, self.config.optimizer.clip_norm))
        self.position = self.position.after(tokens, found.loss if good else None)
        flops = run.flops(batches)
        seconds = time.perf_counter() - began
        line = self._speed.line(self.position, found.loss, tokens, flops, seconds)
        self.display.step(line)
        self._log(line, found, norm, lr, good, step_s=seconds, **run.engine.report())
        return True

    def _log(self, line: StepLine, found: StepGradient, norm: float, lr: float, good: bool, **measured: object) -> None:
        at = self.position
        if not good:
            what = "gradient" if math.isfinite(found.objective) else "loss"
            self.metrics.write(at.step, skipped=what, loss=found.loss, grad_norm=norm)
            self.display.note(f"step {at.step} skipped: its {what} is not finite (loss {found.loss}, norm {norm})")
            self._stop_if_hopeless(what)
        elif at.step % self.config.train.log_every == 0 or at.step == self.config.train.steps:
            self.metrics.write(
                at.step, loss=found.loss, objective=found.objective, lr=lr, grad_norm=norm, tokens=at.tokens,
                tokens_per_second=line.tokens_per_second, mfu=line.mfu, memory=line.memory, **measured,
            )  # fmt: skip

    def _stop_if_hopeless(self, what: str) -> None:
        limit = self.config.train.max_bad_steps
        if self.position.bad >= limit:
            whole = newest_whole(self.out)
            good = f"The last good checkpoint is {whole}" if whole else "No checkpoint was written"
            raise LockstepError(
                f"stopped at step {self.position.step}: the {what} was NaN or infinite in {limit} steps in a row "
                f"(train.max_bad_steps). {good}. Lower optimizer.lr, lengthen schedule.warmup_steps, or set "
                "train.dtype to float32"
            )

    def _evaluate(self) -> None:
        train = self.config.train
        found = self.run.engine.evaluate(self.run.data, train.eval_sequences, train.micro_batch)
        if found is not None:
            self.metrics.write(self.position.step, eval_loss=found.loss, bits_per_byte=found.bits_per_byte)
            self.display.note(
                f"step {self.position.step}: held-out loss {found.loss:.4f}, {found.bits_per_byte:.4f} bits per byte"
            )

    def _save_and_go_on(self) -> None:
        """A save that fails (a full disk) costs a message, not the run. In a row of bad steps nothing is saved."""
        if self.position.bad:
            return
        try:
            self._save()
        except LockstepError as error:
            self.metrics.write(self.position.step, save_failed=str(error))
            self.display.note(f"{error}. Training goes on; the next save is tried at its time")

    def _save(self) -> Path:
        path = save(self.run, self.config, self.position, self.out)
        self._saved = self.position.step
        return path

    def _due(self, every: int) -> bool:
        return every > 0 and self.position.step % every == 0
