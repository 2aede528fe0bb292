"""The gated MLP of a block."""

from __future__ import annotations

from torch import Tensor, nn

from lockstep.config.model import ModelConfig
from lockstep.model.linear import Linear
from lockstep.ops import Operators


class MLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, width: int | None = None):
        """width: by default the configuration's intermediate_size."""
        super().__init__()
        width = width or config.intermediate_size
        self.activation = config.activation
        self.gate = Linear(config.hidden_size, width)
        self.up = Linear(config.hidden_size, width)
        self.down = Linear(width, config.hidden_size)

    def forward(self, ops: Operators, x: Tensor) -> Tensor:
        return self.down(ops, ops.gated(self.gate(ops, x), self.up(ops, x), self.activation))
