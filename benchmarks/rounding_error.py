"""How far bfloat16 logits are from float32 ones on SmolLM2-135M: ours, and `transformers`' with the same weights.

    python benchmarks/rounding_error.py [--tokens 256]

The text is the source of `json.decoder`. Printed per side: mean and largest absolute difference from our float32
logits, and on how many positions the most probable token is the same.
"""

from __future__ import annotations

import argparse
import json.decoder
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import lockstep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    count = parser.parse_args().tokens
    model = lockstep.load("smollm2-135m")
    ids = model.tokenizer.encode(Path(json.decoder.__file__).read_text())[:count]
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        model.save(directory)
        right = lockstep.load(directory, dtype="float32").logits(ids)
        report("lockstep, bfloat16", model.logits(ids), right)
        report("transformers, bfloat16", theirs(directory, ids), right)


def theirs(directory: Path, ids: list[int]) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids])).logits[0]
    return logits.float()


def report(name: str, logits: Tensor, right: Tensor) -> None:
    error, same = (logits - right).abs(), (logits.argmax(-1) == right.argmax(-1)).float().mean()
    print(f"{name:24s} mean {error.mean():.4f}  largest {error.max():.3f}  same token at {100 * same:.1f} %")


if __name__ == "__main__":
    main()
