"""Time to load a model directory, beside `transformers`' `from_pretrained`, in turn in one process."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.bench.machine import describe
from lockstep.bench.report import Report
from lockstep.bench.shapes import shape
from lockstep.bench.turns import Spread, ratios, take_turns
from lockstep.model import Model, load
from lockstep.model.init import random_decoder
from lockstep.ops import operators

WHAT = {
    "load": "the model can be used; a mapped file is read when it is touched",
    "load, every page touched": "all weights have been read",
}


def bench_load(
    directory: Path | None, model: str, rounds: int, note: Callable[[str], None] = print, peer: bool = True
) -> Report:
    """Load a Hugging Face directory, or a shape with random weights in bfloat16, into its stored dtype.

    peer: also by transformers, which must be installed.
    """
    machine = describe("transformers")
    with tempfile.TemporaryDirectory() as scratch:
        place = directory or _exported(model, Path(scratch) / "model")
        sides = _sides(place, peer)
        told = lambda i, found: note(f"round {i + 1} of {rounds}")  # noqa: E731
        seconds = take_turns(sides, rounds, progress=told)
    name = str(directory or model)
    return Report(
        name="load",
        title=f"Loading {name}",
        command=f"lockstep bench load {directory or ''}".strip() + f" --rounds {rounds}",
        machine=machine,
        columns=("what", "lockstep", "transformers", "lockstep is"),
        rows=tuple(_row(what, seconds) for what in WHAT),
        notes=tuple(f"{what}: {meaning}." for what, meaning in WHAT.items()),
        data={"seconds": seconds},
    )


def _exported(model: str, directory: Path) -> Path:
    Model(random_decoder(shape(model), 0), None, operators("fast"), torch.bfloat16).save(directory)
    return directory


def _sides(directory: Path, peer: bool) -> dict[str, Callable[[], float]]:
    loaders: dict[str, Callable[[], torch.nn.Module]] = {"lockstep": lambda: load(directory).decoder}
    if peer:
        loaders["transformers"] = lambda: _theirs(directory)
    sides = {}
    for who, loader in loaders.items():
        for what, touch in zip(WHAT, (False, True), strict=True):
            sides[f"{who}: {what}"] = _timed(loader, touch)
    return sides


def _theirs(directory: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)


def _timed(loader: Callable[[], torch.nn.Module], touch: bool) -> Callable[[], float]:
    def once() -> float:
        gc.collect()
        start = time.perf_counter()
        module = loader()
        if touch:
            for p in module.parameters():
                p.detach().view(-1)[:: 4096 // p.element_size()].sum()  # one element of every page
        return time.perf_counter() - start

    return once


def _row(what: str, seconds: dict[str, Sequence[float]] | dict[str, list[float]]) -> tuple[str, ...]:
    ours = seconds[f"lockstep: {what}"]
    mine = f"{1e3 * Spread.of(ours).median:.1f} ms"
    theirs = seconds.get(f"transformers: {what}")
    if theirs is None:
        return what, mine, "", ""
    ratio = ratios(ours, theirs)
    return what, mine, f"{1e3 * Spread.of(theirs).median:.1f} ms", f"{ratio.median:.1f}x"
