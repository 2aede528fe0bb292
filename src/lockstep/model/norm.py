"""The norm of a block."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lockstep.config.model import ModelConfig
from lockstep.model.linear import unset
from lockstep.ops import Operators


class Norm(nn.Module):
    """RMS norm over the last dimension, weight [width]."""

    def __init__(self, config: ModelConfig, width: int, eps: float | None = None):
        """eps: by default the configuration's."""
        super().__init__()
        self.eps, self.offset = config.norm_eps if eps is None else eps, config.norm_offset
        self.weight = unset(width)

    def forward(self, ops: Operators, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, self.offset, out_dtype=dtype)
