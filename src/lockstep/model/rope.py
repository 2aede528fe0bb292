"""The rotary table: cos and sin of position times frequency, made once and grown when longer input comes.

An entry is a pure function of its position and frequency: float32 frequency times float32 position (as in
`transformers`), the cosine and sine of that angle in float64, rounded to float32. Rows are computed in blocks of
fixed shape, so that an entry always takes the same vector lane and does not depend on the table's length.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from lockstep.config.model import ModelConfig, RopeScaling

_BLOCK = 1024


class RopeTable:
    """The table of one base wavelength. ``rows(n)`` gives at least n rows of float32 [P, d / 2, 2]."""

    def __init__(self, head_dim: int, theta: float, scaling: RopeScaling | None, max_positions: int):
        self.frequencies = frequencies(head_dim, theta, scaling)
        self.factor = 1.0 if scaling is None else scaling.turn_factor
        self.max_positions = max_positions
        self._table: Tensor | None = None

    def rows(self, count: int, device: torch.device) -> Tensor:
        """float32 [P, d / 2, 2] with P >= count; P grows by doubling up to max_positions."""
        if device.type == "meta":
            return torch.empty(count, len(self.frequencies), 2, device=device)
        table = self._table
        if table is None or table.shape[0] < count or table.device != device:
            length = max(count, min(self.max_positions, max(2 * _BLOCK, 2 * (0 if table is None else len(table)))))
            table = self._table = build(self.frequencies, length, self.factor).to(device)
        return table


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """float32 [head_dim / 2]: radians per position (RoFormer, https://arxiv.org/abs/2104.09864)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    plain = 1.0 / (theta**exponents)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    return _llama3(plain, scaling) if scaling.kind == "llama3" else _yarn(plain, head_dim, theta, scaling)


def _llama3(plain: Tensor, scaling: RopeScaling) -> Tensor:
    """Llama 3.1: long wavelengths divided by factor, short ones kept, a linear passage in between."""
    low, high, positions = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_positions
    wavelengths = 2 * math.pi / plain
    smooth = (positions / wavelengths - low) / (high - low)
    passage = (1 - smooth) * (plain / scaling.factor) + smooth * plain
    scaled = torch.where(wavelengths > positions / low, plain / scaling.factor, passage)
    return torch.where(wavelengths < positions / high, plain, scaled)


def _yarn(plain: Tensor, head_dim: int, theta: float, scaling: RopeScaling) -> Tensor:
    """YaRN (https://arxiv.org/abs/2309.00071): as `_llama3`, the passage being a ramp over the frequencies' numbers."""

    def number(turns: float) -> float:
        """Of the frequency that turns so often within the first training; a real number."""
        return head_dim * math.log(scaling.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(number(scaling.beta_fast)), 0)
    high = min(math.ceil(number(scaling.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return plain / scaling.factor * (1 - kept) + plain * kept


def build(frequencies: Tensor, length: int, factor: float = 1.0) -> Tensor:
    """float32 [length, d / 2, 2] of cos and sin, times factor."""
    table = np.empty((length, len(frequencies), 2), dtype=np.float32)
    for start in range(0, length, _BLOCK):
        positions = np.arange(start, start + _BLOCK, dtype=np.float32)
        angles = (positions[:, None] * frequencies.numpy()[None, :]).astype(np.float64)
        kept = min(_BLOCK, length - start)
        table[start : start + kept, :, 0] = np.cos(angles)[:kept] * factor
        table[start : start + kept, :, 1] = np.sin(angles)[:kept] * factor
    return torch.from_numpy(table)


def tables(config: ModelConfig) -> tuple[RopeTable, RopeTable]:
    """The tables of full and of sliding layers: the same object unless the family has a local base."""
    full = RopeTable(config.rope_dim, config.rope_theta, config.rope_scaling, config.max_positions)
    if config.rope_theta_local is None:
        return full, full
    return full, RopeTable(config.rope_dim, config.rope_theta_local, None, config.max_positions)
