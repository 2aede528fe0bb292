"""What a checkpoint of a run holds, and how a run is put back from it, bit for bit."""

from __future__ import annotations

import base64
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config import Config, save_config
from lockstep.errors import LockstepError
from lockstep.ops.device_class import device_class, environment_for
from lockstep.train.changes import changes, refuse_changes
from lockstep.train.checkpoint import (
    RUN_CONFIG,
    Checkpoint,
    check_shapes,
    checkpoints,
    load_checkpoint,
    prune,
    save_checkpoint,
    set_aside_after,
    step_of,
    step_path,
)
from lockstep.train.module import AnyRun


@dataclass(frozen=True)
class Position:
    """Where a run stands after ``step`` global batches. bad: how many of the last ones in a row were skipped.

    updates: optimizer updates made. tokens: trained on. loss: of the last good step.
    """

    step: int = 0
    updates: int = 0
    tokens: int = 0
    bad: int = 0
    loss: float | None = None

    def after(self, tokens: int, loss: float | None) -> Position:
        """The position after a global batch; ``loss`` None: it was bad, and skipped."""
        if loss is None:
            return replace(self, step=self.step + 1, bad=self.bad + 1)
        return Position(self.step + 1, self.updates + 1, self.tokens + tokens, 0, loss)


def snapshot(run: AnyRun, config: Config, at: Position) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]] | None:
    """The tensors (by our names) and the plain state that a checkpoint is made of; None on ranks that write none."""
    found = run.engine.state()
    if found is None:
        return None
    tensors = {"model": run.fixed() | found[0], "optimizer": found[1]}
    state = {
        "position": asdict(at),
        "data": run.data.tokens.about.key,
        "seed": run.data.seed,
        "rng": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "torch": torch.__version__,
        "base": run.base,
        "vocabulary_segments": run.vocabulary_segments,
    }
    return tensors, {"state": state, "config": config.model_dump(mode="json")}


def save(run: AnyRun, config: Config, at: Position, out: Path) -> Path:
    """Write the checkpoint of this position and remove those that need not stay.

    A checkpoint of a whole model is a Hugging Face directory too (float32 masters, config.json, tokenizer), so
    ``lockstep hash`` and `load` read it as it is. Raises `LockstepError` if a weight is not finite or the disk is full.
    """
    path, found = step_path(out, at.step), snapshot(run, config, at)
    if found is None:
        return path
    tensors, documents = found
    wrong = [name for name, p in tensors["model"].items() if not torch.isfinite(p).all()]
    if wrong:
        raise LockstepError(f"not saved at step {at.step}: {wrong[0]} holds NaN or infinite weights")
    stem, names = run.weights_file(list(tensors["model"]))
    files = {stem: {names[n]: t for n, t in tensors["model"].items()}, "optimizer": tensors["optimizer"]}
    plain = {"state": documents["state"], **run.documents()}

    def extra(folder: Path) -> None:
        save_config(config, folder / RUN_CONFIG)
        run.tokenizer.save(folder)

    save_checkpoint(path, at.step, files, plain, version("lockstep"), device_class(), extra)
    prune(out, config.train.keep_last, config.train.keep_every)
    return path


def locate(directory: Path, out: Path) -> Checkpoint:
    """The verified checkpoint at ``directory``: itself one, or a run's directory, of which the newest is taken.

    Raises `LockstepError` if there is none or if it is damaged, with the newest whole one as advice.
    """
    if step_of(directory) is not None:
        if not directory.is_dir():
            raise LockstepError(f"there is no checkpoint {directory}")
        return load_checkpoint(directory, out)
    found = checkpoints(directory)
    if not found:
        raise LockstepError(f"{directory} holds no checkpoint to resume from: leave --resume out to begin a run there")
    return load_checkpoint(found[-1], directory)


def restore(run: AnyRun, config: Config, point: Checkpoint, out: Path, allow_changes: bool) -> Position:
    """Put weights, moments and generator state into the run. Later checkpoints of the run are set aside."""
    state = point.document("state")
    _check_kind(run, point)
    if not allow_changes:
        refuse_changes(point.path, _differences(run, config, point, state))
    expected, expected_moments = run.engine.expected()
    expected = run.expected_fixed() | expected
    stem, names = run.weights_file(list(expected))
    if not (point.path / f"{stem}.safetensors").exists():
        held = "a whole model" if run.adapters_only else "adapters"
        wanted = "adapters" if run.adapters_only else "the whole model"
        raise LockstepError(
            f"checkpoint {point.path} holds {held}, but this run trains {wanted}: give lora.rank the value it had "
            "there, or begin a new run with --out"
        )
    weights, moments = point.tensors(stem), point.tensors("optimizer")
    check_shapes(point.path, weights, {names[n]: p for n, p in expected.items()})
    check_shapes(point.path, moments, expected_moments)
    at = Position(**state["position"])
    run.engine.load({ours: weights[theirs] for ours, theirs in names.items()}, moments, at.updates)
    for name, own in run.fixed().items():
        if not own.is_meta:  # of another stage's layers
            own.copy_(weights[names[name]])
    torch.set_rng_state(torch.from_numpy(np.frombuffer(base64.b64decode(state["rng"]), dtype=np.uint8).copy()))
    with run.mesh.first_alone():  # the others may still be reading
        if run.mesh.first:
            set_aside_after(out, at.step)
    return at


def _check_kind(run: AnyRun, point: Checkpoint) -> None:
    """A module's checkpoint goes into that module, and a model's into a model."""
    held = point.document("module")["class"] if (point.path / "module.json").exists() else None
    own = run.documents().get("module", {}).get("class")
    if held != own:
        theirs, ours = (f"the module {name}" if name else "a Lockstep model" for name in (held, own))
        advice = f"give Trainer a module of class {held}" if held else "leave Trainer's module out"
        raise LockstepError(f"checkpoint {point.path} holds {theirs}, but this run trains {ours}: {advice}")


def _differences(run: AnyRun, config: Config, point: Checkpoint, state: dict[str, Any]) -> list[str]:
    found = changes(point.config(), config.model_dump(mode="json"))
    variable = environment_for(point.manifest.device_class)
    as_before = f" (as before with {variable} in the environment)" if variable else ""
    facts = (
        (f"device class{as_before}", point.manifest.device_class, device_class()),
        ("torch", state["torch"], torch.__version__),
        ("corpus or tokenizer (content hash)", state["data"], run.data.tokens.about.key),
        ("base weights (hash)", state["base"], run.base),
        # Not in checkpoints of versions that summed over the whole vocabulary whatever canonical_tp was.
        ("segments of the vocabulary", state.get("vocabulary_segments", 1), run.vocabulary_segments),
    )
    return found + [f"{name}: {was} -> {now}" for name, was, now in facts if was != now]
