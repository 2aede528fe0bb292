"""AdamW with decoupled weight decay (Loshchilov and Hutter, 2019) on float32 masters and moments.

Every operation is one elementwise IEEE operation (multiply, add, divide, root), so the result does not
depend on threads, on vector tails or on how a parameter is cut into shards. PyTorch's fused AdamW is not
used for that reason: its second moment differs between vector body and tail (measured on AVX2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.config.train import OptimizerConfig

CHUNK = 1 << 16
"""Elements updated at a time: four float32 streams of a chunk stay in the second-level cache."""


class AdamW:
    """The optimizer over named parameters, updated in place.

    parameters: float32 tensors (float64 in tests) by name. Parameters with fewer than two dimensions (norms
    and biases) have no weight decay.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self.parameters = dict(parameters)
        self.config = config
        self.step_count = 0
        self.first = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, gradients: list[Tensor], lr: float, scale: float = 1.0) -> None:
        """One update. gradients: in the order of the parameters; each is multiplied by ``scale`` first (clipping)."""
        self.step_count += 1
        for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
            decay = lr * self.config.weight_decay if parameter.dim() >= 2 else 0.0
            own = (t.view(-1).split(CHUNK) for t in (parameter, self.first[name], self.second[name]))
            for p, m, v, g in zip(*own, gradient.reshape(-1).split(CHUNK), strict=True):
                self._update(p, g if scale == 1.0 else g * scale, m, v, lr, decay)

    def _update(self, p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float, decay: float) -> None:
        c = self.config
        m.mul_(c.beta1).add_(g * (1.0 - c.beta1))
        v.mul_(c.beta2).add_((g * g).mul_(1.0 - c.beta2))
        root = v.sqrt().mul_(1.0 / math.sqrt(1.0 - c.beta2**self.step_count)).add_(c.eps)
        if decay:
            p.mul_(1.0 - decay)
        p.sub_((m * (lr / (1.0 - c.beta1**self.step_count))).div_(root))

    def state_dict(self) -> dict[str, Tensor]:
        """The moments under ``first.<name>`` and ``second.<name>``; the step count is the caller's to keep."""
        first = {f"first.{name}": t for name, t in self.first.items()}
        return first | {f"second.{name}": t for name, t in self.second.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor], step_count: int) -> None:
        """Take moments of the same names and shapes (checked by the checkpoint)."""
        self.step_count = step_count
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])


def clip_scale(norm: float, limit: float) -> float:
    """What gradients of this global norm are multiplied by, so that it is at most ``limit`` (0: no limit)."""
    return limit / norm if 0.0 < limit < norm else 1.0
