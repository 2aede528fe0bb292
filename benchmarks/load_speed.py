"""Time to load a model directory: `lockstep.load` against `AutoModelForCausalLM.from_pretrained`, side by side.

    python benchmarks/load_speed.py [DIRECTORY] [--rounds 9]

Without a directory SmolLM2-135M is exported to a temporary one first. Both load into the stored dtype (bfloat16), in
one process, alternating, after one unmeasured round each. Since a mapped file is not read until it is used, a second
pair also touches every page of the weights; `lockstep.load` reads the tokenizer on first use, so a third pair asks
for it. The times of a round are printed as JSON lines, then the medians and their ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = arguments.directory or exported(Path(scratch) / "smollm2-135m")
        report(measure(directory, arguments.rounds))


def exported(directory: Path) -> Path:
    import lockstep

    lockstep.load("smollm2-135m", numerics="fast").save(directory)
    return directory


def measure(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds per round of each loader, alternating so that a busy moment of the machine hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in LOADERS}
    for i in range(rounds + 1):
        for name, loader in LOADERS.items():
            gc.collect()
            start = time.perf_counter()
            loader(directory)
            seconds = time.perf_counter() - start
            if i > 0:
                times[name].append(seconds)
        if i > 0:
            print(json.dumps({name: round(values[-1], 4) for name, values in times.items()}), flush=True)
    return times


def ours(directory: Path) -> torch.nn.Module:
    import lockstep

    return lockstep.load(directory).decoder


def ours_with_tokenizer(directory: Path) -> None:
    import lockstep

    _ = lockstep.load(directory).tokenizer


def ours_touched(directory: Path) -> None:
    _touch(ours(directory))


def theirs(directory: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)


def theirs_touched(directory: Path) -> None:
    _touch(theirs(directory))


def theirs_with_tokenizer(directory: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(directory)
    theirs(directory)


def _touch(module: torch.nn.Module) -> None:
    for parameter in module.parameters():
        parameter.detach().view(-1)[:: 4096 // parameter.element_size()].sum()  # one element of every page


LOADERS: dict[str, Callable[[Path], Any]] = {
    "lockstep.load": ours,
    "from_pretrained": theirs,
    "lockstep.load, every page touched": ours_touched,
    "from_pretrained, every page touched": theirs_touched,
    "lockstep.load and tokenizer": ours_with_tokenizer,
    "from_pretrained and tokenizer": theirs_with_tokenizer,
}
"""In pairs: ours, theirs."""


def report(times: dict[str, list[float]]) -> None:
    medians = {name: statistics.median(values) for name, values in times.items()}
    names = list(medians)
    for mine, other in zip(names[::2], names[1::2], strict=True):
        ratio = medians[other] / medians[mine]
        print(f"{mine:36s} {1e3 * medians[mine]:7.1f} ms   {other:36s} {1e3 * medians[other]:7.1f} ms   {ratio:.1f}x")


if __name__ == "__main__":
    main()
