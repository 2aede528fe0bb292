"""Lockstep's own sides of the training bench, one process each.

python -m lockstep.bench.train_own MODEL_DIRECTORY TOKENS.npy SIDE LEARNING_RATE
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from lockstep.bench.step_server import serve
from lockstep.config import CompileConfig, OptimizerConfig
from lockstep.model import load
from lockstep.ops import Numerics, Packed, operators
from lockstep.train.data import Batch
from lockstep.train.execution import execution
from lockstep.train.optimizer import AdamW
from lockstep.train.step import Compute


@dataclass(frozen=True)
class Own:
    """How a side runs. masters: dtype of weights and moments. level: of the compiler (`docs/compile.md`)."""

    numerics: Numerics = "bitwise"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    masters: Literal["bfloat16", "float32"] = "float32"
    level: Literal["O0", "O1", "O2"] = "O0"


OWN = {
    "lockstep": Own(),
    "lockstep-O1": Own(level="O1"),
    "lockstep-O2": Own(level="O2"),
    "lockstep-float32": Own(dtype="float32"),
    "lockstep-float32-O2": Own(dtype="float32", level="O2"),
    "lockstep-fast": Own(numerics="fast"),
    "lockstep-fast-float32": Own(numerics="fast", dtype="float32"),
    "lockstep-pure-bf16": Own(masters="bfloat16"),
}
"""`lockstep-pure-bf16` keeps weights, gradients and moments in bfloat16, as `transformers` in bfloat16 does."""


def main(directory: str, tokens: str, side: str, rate: str) -> None:
    own, ids = OWN[side], torch.from_numpy(np.load(tokens))
    decoder = load(directory, dtype=own.masters, numerics="fast").decoder
    for parameter in decoder.parameters():
        parameter.data = parameter.data.clone()  # memory of its own: a loaded weight is a view of the file
    decoder.train()
    serve((training_step if own.masters == "float32" else _pure)(decoder, own, batch_of(ids), float(rate)))


def batch_of(ids: torch.Tensor) -> Batch:
    """Sequences [S, T] that predict their own next tokens."""
    sequences, length = ids.shape
    targets = torch.cat([ids[:, 1:], torch.full((sequences, 1), -1)], dim=1)
    return Batch(ids.flatten(), targets.flatten(), Packed.of([length] * sequences))


def training_step(decoder: torch.nn.Module, own: Own, batch: Batch, rate: float) -> Callable[[], float]:
    """What the trainer does in a step."""
    compute = Compute(operators(own.numerics), getattr(torch, own.dtype))
    parameters = dict(decoder.named_parameters())
    optimizer = AdamW(parameters, OptimizerConfig(lr=rate, weight_decay=0.0), compute.ops)
    config, rows = CompileConfig(level=own.level), len(batch.tokens)
    run = execution(decoder, compute, parameters, optimizer, 0.0, config, rows, _tell)  # type: ignore[arg-type]

    def step() -> float:
        found = run.gradient([batch], lambda: False)
        assert found is not None
        run.update(found.gradient, rate, 1.0)
        return found.loss

    return step


def _tell(line: str) -> None:
    """Standard output is what the bench reads."""
    print(line, file=sys.stderr)


def _pure(decoder: torch.nn.Module, own: Own, batch: Batch, rate: float) -> Callable[[], float]:
    """The same operators with the peer's precision and the peer's update."""
    ops, weights = operators(own.numerics), torch.full(batch.targets.shape, 1.0 / batch.loss_tokens)
    update = FusedAdamW(decoder.parameters(), rate)

    def step() -> float:
        hidden = decoder(ops, batch.tokens, batch.packed, dtype=torch.bfloat16)
        loss, _ = ops.linear_cross_entropy(hidden, decoder.head_weight, batch.targets, weights)
        loss.backward()
        update()
        return float(loss.detach())

    return step


class FusedAdamW:
    """PyTorch's fused AdamW as `torch.optim.AdamW(fused=True)` calls it. That class imports the compiler with its first
    optimizer, 110 MiB that no step needs."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter], rate: float) -> None:
        self._parameters: list[torch.Tensor] = [*parameters]
        self._rate = rate
        self._first = [torch.zeros_like(p, requires_grad=False) for p in self._parameters]
        self._second = [torch.zeros_like(p, requires_grad=False) for p in self._parameters]
        self._steps = [torch.zeros(()) for _ in self._parameters]

    @torch.no_grad()
    def __call__(self) -> None:
        """One update by the gradients, which the parameters give away."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        torch._foreach_add_(self._steps, 1)
        torch._fused_adamw_(
            self._parameters, gradients, self._first, self._second, [], self._steps, lr=self._rate, beta1=0.9,
            beta2=0.95, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        for parameter in self._parameters:
            parameter.grad = None


if __name__ == "__main__":
    main(*sys.argv[1:])
