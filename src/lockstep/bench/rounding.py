"""How far logits in bfloat16 are from those in float32: ours, and `transformers`' with the same weights."""

from __future__ import annotations

import json.decoder
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from lockstep.bench.machine import describe
from lockstep.bench.report import Report
from lockstep.model import load


@dataclass(frozen=True)
class Error:
    """mean and largest absolute difference of logits; same: share of positions with the same most probable token."""

    side: str
    mean: float
    largest: float
    same: float


def bench_rounding(model: str, tokens: int) -> Report:
    """Errors of a model's bfloat16 logits over the beginning of the source of `json.decoder`.

    model: what `lockstep.load` takes; it must have a tokenizer. transformers must be installed.
    """
    loaded = load(model, dtype="bfloat16")
    ids = loaded.tokenizer.encode(Path(json.decoder.__file__).read_text())[:tokens]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        loaded.save(directory)
        right = load(directory, dtype="float32").logits(ids)
        sides = {"lockstep": loaded.logits(ids), "transformers": _theirs(directory, ids)}
    errors = [_error(name, logits, right) for name, logits in sides.items()]
    return Report(
        name="rounding",
        title=f"Rounding error of bfloat16 logits of {model}",
        command=f"lockstep bench rounding {model} --tokens {tokens}",
        machine=describe("transformers"),
        columns=("side", "mean difference", "largest", "same most probable token"),
        rows=tuple((e.side, f"{e.mean:.4f}", f"{e.largest:.3f}", f"{100 * e.same:.1f} %") for e in errors),
        notes=(f"Against Lockstep's float32 logits on {len(ids)} tokens of source code.",),
        data=[asdict(error) for error in errors],
    )


def _theirs(directory: Path, ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits.float()


def _error(side: str, logits: Tensor, right: Tensor) -> Error:
    away, same = (logits - right).abs(), (logits.argmax(-1) == right.argmax(-1)).float().mean()
    return Error(side, float(away.mean()), float(away.max()), float(same))
