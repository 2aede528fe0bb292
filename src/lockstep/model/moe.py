"""A mixture of experts in place of the MLP: a router, experts of which each token goes to a few, and shared ones.

As in Mixtral (arXiv 2401.04088), Qwen3-MoE and DeepSeek (arXiv 2401.06066, 2412.19437).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.model import ModelConfig
from lockstep.model.linear import WeightCache, unset
from lockstep.model.mlp import MLP
from lockstep.ops import Operators, Routing


@dataclass(frozen=True)
class Routed:
    """What one layer's router did: logits float32 [T, E], and where each expert's rows begin, offsets int32 [E + 1]."""

    logits: Tensor
    offsets: Tensor


def balance_loss(ops: Operators, routed: Sequence[Routed]) -> Tensor:
    """The load-balance loss over all layers, a float32 scalar: `top_k` where every expert is used alike."""
    return ops.balance_loss([r.logits for r in routed], [r.offsets for r in routed])


class MoE(nn.Module):
    """The weighted sum of each token's experts, plus the shared experts."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        width = config.expert_intermediate_size or config.intermediate_size
        sigmoid = config.router_scoring == "sigmoid"
        self.routing = Routing(
            config.experts_per_token, config.router_scoring, config.router_normalize, config.router_groups,
            config.router_top_groups, pairs=sigmoid, scale=config.router_scale,
        )  # fmt: skip
        self.router = Router(config.hidden_size, config.num_experts, biased=sigmoid)
        self.experts = Experts(config, width)
        self.shared = MLP(config, config.shared_experts * width) if config.shared_experts else None

    def forward(self, ops: Operators, x: Tensor, routed: list[Routed] | None = None) -> Tensor:
        """x [T, D] -> [T, D]. routed: takes what the router did."""
        logits = self.router(ops, x)
        routes = ops.route(logits, self.routing, self.router.bias)
        if routed is not None:
            routed.append(Routed(logits, routes.offsets))
        y = ops.combine(self.experts(ops, ops.dispatch(x, routes), routes.groups), routes)
        return y if self.shared is None else y + self.shared(ops, x)


class Router(nn.Module):
    """Logits of the experts, in float32. weight [E, D]; bias float32 [E] or None, for the choice alone, never trained
    by a gradient."""

    float32 = frozenset({"bias"})
    """Kept in float32 whatever the compute dtype: close scores decide by its last bits."""

    def __init__(self, width: int, experts: int, biased: bool):
        super().__init__()
        self.weight = unset(experts, width)
        self.bias = unset(experts).requires_grad_(False) if biased else None
        self.cache = WeightCache()

    def forward(self, ops: Operators, x: Tensor) -> Tensor:
        """x [T, D] -> logits float32 [T, E]."""
        return ops.linear(x, self.cache.get(self.weight, ops, x.dtype), None, out_dtype=torch.float32)

    def prepare(self, ops: Operators, dtype: torch.dtype) -> None:
        """Pack the weight for inference in this dtype."""
        self.cache.fill(self.weight, ops, dtype)


class Experts(nn.ModuleList):
    """Gated MLPs that compute together. Their rows are not those of the batch but stand by expert, then by token."""

    def __init__(self, config: ModelConfig, width: int):
        super().__init__(Expert(config.hidden_size, width) for _ in range(config.num_experts))
        self.activation = config.activation

    def forward(self, ops: Operators, rows: Tensor, offsets: Tensor) -> Tensor:
        """rows [R, D], those of group g from offsets[g] to offsets[g + 1] -> [R, D]. A group is an expert's rows."""
        gate, up, down = ([part.ready(ops, rows.dtype) for part in parts] for parts in self._parts())
        if ops.experts is not None:
            return ops.experts(rows, gate, up, down, offsets, self.activation)
        return ops.grouped_linear(ops.grouped_gated(rows, gate, up, offsets, self.activation), down, offsets)

    def prepare(self, ops: Operators, dtype: torch.dtype) -> None:
        """Pack every weight for inference in this dtype."""
        for parts in self._parts():
            for part in parts:
                if len(part.weight):  # of another device's expert there are no rows
                    part.cache.fill(part.weight, ops, dtype)

    def _parts(self) -> tuple[list[ExpertWeight], ...]:
        return tuple([getattr(expert, name) for expert in self] for name in ("gate", "up", "down"))


class Expert(nn.Module):
    """The weights of one expert: gate and up [F, D], down [D, F]."""

    def __init__(self, inputs: int, width: int):
        super().__init__()
        self.gate, self.up = ExpertWeight(inputs, width), ExpertWeight(inputs, width)
        self.down = ExpertWeight(width, inputs)


class ExpertWeight(nn.Module):
    """One matrix of an expert, weight [N, K]. Not a Linear: it computes with those of the other experts."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = unset(outputs, inputs)
        self.cache = WeightCache()

    def ready(self, ops: Operators, dtype: torch.dtype) -> Any:
        """The packed weight where there is one, else the weight."""
        return self.cache.get(self.weight, ops, dtype)
