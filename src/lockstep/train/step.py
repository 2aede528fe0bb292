"""One training step's gradient: forward and backward over canonical micro-batches, summed in a fixed order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lockstep.model.decoder import Decoder
from lockstep.model.moe import Routed, balance_loss
from lockstep.ops import Operators, Packed
from lockstep.ops.tree import tree_sum
from lockstep.train.data import Batch
from lockstep.train.tree import GradientTree, tree_total


@dataclass(frozen=True)
class Compute:
    """How the model is run: its operators and compute dtype."""

    ops: Operators
    dtype: torch.dtype


@dataclass(frozen=True)
class StepGradient:
    """The gradient of a global batch, float32, in the order of the parameters.

    loss: mean of -log p over the batch's loss tokens, nats. objective: what was differentiated (with z-loss, and the
    load-balance loss of a model with experts: its mean over the micro-batches).
    """

    gradient: list[Tensor]
    loss: float
    objective: float


def step_gradient(
    decoder: Decoder,
    compute: Compute,
    parameters: Mapping[str, nn.Parameter],
    batches: Sequence[Batch],
    z_loss: float,
    stop: Callable[[], bool] = lambda: False,
    forward: Forward | None = None,
    group: int = 1,
) -> StepGradient | None:
    """The gradient of the mean loss over all loss tokens of the global batch, or None if ``stop`` said so between
    two micro-batches. Parameters are not changed; their ``.grad`` is None before and after. forward: called in the
    decoder's place. group: micro-batches of a canonical group.
    """
    return sum_gradients(eager(decoder, compute, parameters, z_loss, len(batches), forward), batches, stop, group)


Shares = tuple[float, float, list[Tensor]]
"""A micro-batch's shares of the objective, of the loss and of the gradient (in the order of the parameters)."""

Micro = Callable[[Batch, float], Shares]
"""Of a micro-batch and the weight of a loss token."""


Forward = Callable[[Tensor, Packed, list[Routed] | None], Tensor]
"""Of tokens and their packing to the final hidden states; the list takes what routers did, for the balance loss."""


def sum_gradients(
    micro: Micro,
    batches: Sequence[Batch],
    stop: Callable[[], bool],
    group: int,
    recycle: Callable[[list[Tensor]], None] | None = None,
) -> StepGradient | None:
    """The shares of all micro-batches, summed in the fixed order; None if ``stop`` said so between two of them.
    group: micro-batches of a canonical group. recycle: takes gradients that were added into others."""
    weight, tree = token_weight(batches), GradientTree(group, recycle)
    losses, objectives = [], []
    for batch in batches:
        if stop():
            return None
        objective, loss, gradient = micro(batch, weight)
        tree.push(gradient)
        del gradient  # it may have been added into another: then its memory is free for the next one's
        objectives.append(objective)
        losses.append(loss)
    return StepGradient(tree.total(), tree_total(losses), tree_total(objectives))


def eager(
    decoder: Decoder,
    compute: Compute,
    parameters: Mapping[str, nn.Parameter],
    z_loss: float,
    micro_batches: int,
    forward: Forward | None = None,
) -> Micro:
    """A micro-batch through autograd. micro_batches: how many share the load-balance loss of a model with experts.
    forward: called in the decoder's place."""
    balance = decoder.config.router_aux_loss / max(micro_batches, 1)

    def micro(batch: Batch, weight: float) -> Shares:
        routed: list[Routed] | None = [] if balance else None
        if forward is None:
            hidden = decoder(compute.ops, batch.tokens, batch.packed, dtype=compute.dtype, routed=routed)
        else:
            hidden = forward(batch.tokens, batch.packed, routed)
        objective, loss = shares(decoder, compute, hidden, batch, weight, z_loss)
        if routed:
            objective = objective + balance * balance_loss(compute.ops, routed)
        objective.backward()
        return float(objective.detach()), loss, [take_gradient(p) for p in parameters.values()]

    return micro


def shares(
    decoder: Decoder, compute: Compute, hidden: Tensor, batch: Batch, weight: float, z_loss: float
) -> tuple[Tensor, float]:
    """A micro-batch's shares of the objective (a scalar with gradient) and of the loss; weight: of a loss token."""
    weights = torch.full(batch.targets.shape, weight, dtype=torch.float32)
    objective, logprobs = compute.ops.linear_cross_entropy(
        hidden, decoder.head_weight, batch.targets, weights, z_loss=z_loss, softcap=decoder.logit_softcap
    )
    return objective, -weight * logprob_sum(logprobs, batch.targets)


def token_weight(batches: Sequence[Batch]) -> float:
    """The weight of a loss token in the mean over a global batch."""
    return 1.0 / max(sum(b.loss_tokens for b in batches), 1)


def logprob_sum(logprobs: Tensor, targets: Tensor) -> float:
    """The sum of log-probabilities over rows with a target, in float64 and in a fixed order."""
    return float(tree_sum(torch.where(targets >= 0, logprobs, 0.0).double()))


def take_gradient(parameter: nn.Parameter) -> Tensor:
    """The gradient that backward left, which the parameter gives away; zeros where it had no part."""
    gradient = parameter.grad
    parameter.grad = None
    return torch.zeros_like(parameter) if gradient is None else gradient
