"""The engine that trains any `torch.nn.Module` from tokens to logits: eagerly at O0, by `torch.compile` above.

Only what the module computes differs from a run of a Lockstep model: data, the sum over micro-batches, the norm, AdamW
and all around them are the same code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.ops import operators
from lockstep.train.data import Batch, Dataset
from lockstep.train.engine import HoldsAll
from lockstep.train.evaluate import Evaluation, evaluation
from lockstep.train.module_blocks import Compiled, repeated
from lockstep.train.optimizer import AdamW
from lockstep.train.step import Shares, StepGradient, logprob_sum, sum_gradients, take_gradient
from lockstep.train.tree import global_norm

Losses = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Of tokens, targets and positions, each int64 [B, T]: the sum of the objective over loss tokens (a scalar with
gradient), and the log-probabilities of the targets, float32 [B, T]."""


class OnModule(HoldsAll):
    """The engine of one process that trains a module."""

    def __init__(
        self, module: nn.Module, parameters: dict[str, nn.Parameter], config: Config, note: Callable[[str], None]
    ) -> None:
        """parameters: those that train. note: where one-line messages about compilation go."""
        self.module, self.parameters = module, parameters
        self.ops = operators("fast")
        self.optimizer = AdamW(parameters, config.optimizer, self.ops)
        self._rows, self._columns = config.train.micro_batch, config.data.seq_len
        self._level, self._note = config.compile.of_module, note
        self._dtype: torch.dtype = getattr(torch, config.train.dtype)
        self._z_loss, self._group = config.train.z_loss, config.train.group_size
        self._eager = losses(logits_of(module, self._dtype), self._z_loss)
        self._losses: Losses | None = None
        self._stop: Callable[[], bool] = lambda: False
        self._blocks: Compiled | None = None

    def gradient(self, batches: Sequence[Batch], z_loss: float, stop: Callable[[], bool]) -> StepGradient | None:
        self._stop = stop
        try:
            return sum_gradients(self._micro, batches, stop, self._group)
        except _Interrupted:
            return None

    def norm(self, found: StepGradient) -> float:
        return global_norm(found.gradient, self.ops)

    def update(self, found: StepGradient, lr: float, scale: float) -> None:
        self.optimizer.step(found.gradient, lr, scale)

    @torch.no_grad()
    def evaluate(self, data: Dataset, sequences: int, micro_batch: int) -> Evaluation | None:
        """Without compilation, with dropout and the like switched off."""
        batches = list(data.held_out_batches(sequences, micro_batch))
        sums = []
        with evaluating(self.module):
            for batch in batches:
                tokens, targets, positions = grid(batch, 1, self._columns)
                _, logprobs = self._eager(tokens, targets, positions)
                sums.append(logprob_sum(logprobs.flatten(), targets.flatten()))
        return evaluation(sums, batches, data)

    def whole_model(self) -> None:
        """There is none: only a Lockstep model can be exported."""

    def _micro(self, batch: Batch, weight: float) -> Shares:
        if self._losses is None:  # at the first step, so that what only looks at a run compiles nothing
            self._losses = self._at_level()
        try:
            with nullcontext() if self._blocks is None else self._blocks.in_place():
                return self._shares(self._losses, batch, weight)
        except RuntimeError as error:
            from torch._dynamo.exc import TorchDynamoException  # a heavy import, and of no use at O0

            if self._level == "O0" or not isinstance(error, TorchDynamoException):
                raise
            if self._stop():  # Ctrl-C reaches the C++ compiler too, which then fails
                raise _Interrupted from error
            self._give_up(error)
        return self._shares(self._eager, batch, weight)

    def _shares(self, run: Losses, batch: Batch, weight: float) -> Shares:
        tokens, targets, positions = grid(batch, self._rows, self._columns)
        total, logprobs = run(tokens, targets, positions)
        objective = weight * total
        objective.backward()
        loss = -weight * logprob_sum(logprobs.flatten(), targets.flatten())
        # To dense: nn.Embedding(sparse=True) leaves another kind.
        gradient = [take_gradient(p).to_dense() for p in self.parameters.values()]
        return float(objective.detach()), loss, gradient

    def _at_level(self) -> Losses:
        """Every micro-batch has one shape, so nothing is compiled for a second one (`dynamic=False`)."""
        if self._level == "O0":
            return self._eager
        run, blocks = self._eager, repeated(self.module)
        if self._level == "O2":
            what, run = "module and loss as one graph", torch.compile(self._eager, fullgraph=True, dynamic=False)
        elif blocks:
            self._blocks = Compiled(blocks)
            kinds = ", ".join(dict.fromkeys(type(block).__name__ for block in blocks))
            what = f"{len(blocks)} blocks ({kinds}), each kind once"
        else:
            compiled = torch.compile(self.module, dynamic=False)
            what, run = "the module", losses(logits_of(self.module, self._dtype, compiled), self._z_loss)
        self._note(
            f"compile.level {self._level}: torch.compile (Inductor) of {what}, in the first step, for a minute or "
            "more; close to O0, not the same bits"
        )
        return run

    def _give_up(self, error: Exception) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        advice = "; O1 compiles the parts that it can" if self._level == "O2" else ""
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        self._note(f"compile.level {self._level} is not possible here, so the module runs as at O0{advice}: {reason}")
        self._losses, self._blocks = self._eager, None


class _Interrupted(Exception):
    """Somebody asked to stop while a compiler was at work."""


def logits_of(
    module: nn.Module, dtype: torch.dtype, call: Callable[..., Any] | None = None
) -> Callable[[Tensor, Tensor], Tensor]:
    """The forward pass from tokens and positions, int64 [B, T], to logits [B, T, V]; in bfloat16 under autocast.

    call: what is called in the module's place. A forward with a parameter `position_ids` is given the positions, one
    with `use_cache` is told False.
    """
    accepted = inspect.signature(module.forward).parameters
    device = next(module.parameters()).device.type
    run: Callable[..., Any] = module if call is None else call
    places, cached = "position_ids" in accepted, "use_cache" in accepted

    def forward(tokens: Tensor, positions: Tensor) -> Tensor:
        keys: dict[str, Any] = {"position_ids": positions} if places else {}
        if cached:
            keys["use_cache"] = False
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            found = run(tokens, **keys)
        return found.logits if hasattr(found, "logits") else found

    return forward


def losses(forward: Callable[[Tensor, Tensor], Tensor], z_loss: float) -> Losses:
    """Cross-entropy in float32, with z_loss * log(Z)^2 (PaLM) in the objective."""

    def run(tokens: Tensor, targets: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        logits = forward(tokens, positions).float()
        normaliser = torch.logsumexp(logits, -1)
        logprobs = logits.gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1) - normaliser
        objective = torch.where(targets >= 0, z_loss * normaliser.square() - logprobs, 0.0).sum()
        return objective, logprobs.detach()

    return run


def grid(batch: Batch, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """A packed batch as rows: tokens, targets and positions, each int64 [B, columns], B at least ``rows``.

    Documents stand one after the other, a new row beginning where the next one does not fit; no more rows are needed
    than the batch has sequences, which are such a cut too. Rows are filled up with token 0, which has no target and
    its own positions from 0, as a document has.
    """
    places, row, used = [], 0, [0]
    for length in batch.packed.starts.diff().tolist():
        if used[row] + length > columns:
            row += 1
            used.append(0)
        places.append(torch.arange(length) + row * columns + used[row])
        used[row] += length
    used += [0] * (rows - len(used))
    where, size = torch.cat(places), len(used) * columns
    positions = torch.cat([torch.arange(columns) - n for n in used])
    tokens, targets = torch.zeros(size, dtype=torch.int64), torch.full((size,), -1)
    tokens[where], targets[where], positions[where] = batch.tokens, batch.targets, batch.packed.positions.long()
    shape = (len(used), columns)
    return tokens.view(shape), targets.view(shape), positions.view(shape)


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """All of it in evaluation mode, and each part back in its own afterwards."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training
