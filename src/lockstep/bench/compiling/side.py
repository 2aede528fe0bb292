"""One measurement in a process of its own: compile a model of some depth, take a step, then more steps.

    python -m lockstep.bench.compiling.side LEVEL LAYERS CACHE

LEVEL: O0, O1, O2, or torch (`torch.compile` of the same shape in `transformers`). CACHE: the directory of the compile
cache (an empty one: cold). Prints one JSON line: the seconds of compiling, with what the first step takes longer than
later ones, the seconds of a step, and the first loss. An eager step goes before: imports, kernels and memory that is
touched for the first time are no part of compiling.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lockstep.config import ModelConfig

SEQUENCES, LENGTH = 2, 64


def shape(layers: int) -> ModelConfig:
    """A small Llama: compiling, not computing, is what takes time."""
    return ModelConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=352, num_layers=layers, num_heads=4, num_kv_heads=2,
        head_dim=32, max_positions=LENGTH, tie_embeddings=True,
    )  # fmt: skip


def tokens(config: ModelConfig) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(config.vocab_size, (SEQUENCES, LENGTH), generator=generator)


Step = Callable[[], float]
"""Gives the loss."""


@dataclass(frozen=True)
class Side:
    """A step operator by operator, and what makes a compiled one (of the same model)."""

    eager: Step
    compiled: Callable[[], Step]


def levels(config: ModelConfig, level: str, cache: Path, dtype: torch.dtype) -> Side:
    """Training steps of Lockstep; compiled: at a level."""
    from lockstep.compile import Cache
    from lockstep.config import CompileConfig, Config
    from lockstep.model import random_decoder
    from lockstep.ops import Packed, operators
    from lockstep.train.data import Batch
    from lockstep.train.execution import execution
    from lockstep.train.optimizer import AdamW
    from lockstep.train.step import Compute

    ops, decoder, ids = operators("bitwise"), random_decoder(config, 0).train(), tokens(config)
    parameters = dict(decoder.named_parameters())
    optimizer = AdamW(parameters, Config().optimizer, ops)
    targets = torch.cat([ids[:, 1:], torch.full((SEQUENCES, 1), -1)], dim=1).flatten()
    batch = Batch(ids.flatten(), targets, Packed.of([LENGTH] * SEQUENCES))

    def made(level: str) -> Step:
        config = CompileConfig.model_validate({"level": level})
        model = (decoder, Compute(ops, dtype), parameters, optimizer)
        run = execution(*model, 0.0, config, SEQUENCES * LENGTH, print, Cache(cache))

        def step() -> float:
            found = run.gradient([batch], lambda: False)
            assert found is not None
            run.update(found.gradient, 1e-4, min(1.0, 1.0 / run.norm(found.gradient)))
            return found.objective

        return step

    return Side(made("O0"), lambda: made(level))


def torch_compiled(config: ModelConfig, cache: Path, dtype: torch.dtype) -> Side:
    """A training step of the same shape in `transformers`; it is compiled when it is first called."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache)
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    theirs = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers, num_attention_heads=config.num_heads, head_dim=config.head_dim,
        num_key_value_heads=config.num_kv_heads, max_position_embeddings=LENGTH, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(theirs)
    model.to(dtype)
    optimizer, ids = torch.optim.AdamW(model.parameters(), fused=True), tokens(config)

    def made(run: Any) -> Step:
        def step() -> float:
            loss = run(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return float(loss.detach())

        return step

    return Side(made(model), lambda: made(torch.compile(model)))


def main(level: str, layers: int, cache: Path) -> None:
    config = shape(layers)
    side = (torch_compiled if level == "torch" else partial(levels, level=level))(
        config, cache=cache, dtype=torch.float32
    )
    loss = side.eager()
    gc.collect()
    gc.freeze()  # what imports made is out of the collector's sight, as under the command line
    begun, step = time.perf_counter(), side.compiled()
    made = time.perf_counter() - begun
    times = []
    for _ in range(6):
        at = time.perf_counter()
        step()
        times.append(time.perf_counter() - at)
    usual = statistics.median(times[1:])
    print(json.dumps({"compile": made + max(times[0] - usual, 0.0), "step": usual, "loss": loss}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
