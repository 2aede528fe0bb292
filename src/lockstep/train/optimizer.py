"""AdamW with decoupled weight decay (Loshchilov and Hutter, 2019) on float32 masters and moments.

The update is elementwise, one IEEE operation after the other, so the result does not depend on threads, on vector
tails or on how a parameter is cut into shards. PyTorch's fused AdamW is not used for that reason: its second moment
differs between vector body and tail (measured on AVX2).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from lockstep.config.train import OptimizerConfig
from lockstep.errors import LockstepError
from lockstep.ops import AdamWFactors, Operators
from lockstep.ops.contiguous import not_contiguous


class AdamW:
    """The optimizer over named parameters, updated in place.

    parameters: contiguous float32 tensors (float64 too with plain operators) by name. Parameters with fewer than
    two dimensions (norms and biases) have no weight decay.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimizerConfig, ops: Operators) -> None:
        self.parameters, self.ops = dict(parameters), ops
        self.config = config
        self.step_count = 0
        self.first = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}
        self.second = {name: torch.zeros_like(p, requires_grad=False) for name, p in self.parameters.items()}

    @torch.no_grad()
    def step(self, gradients: list[Tensor], lr: float, scale: float = 1.0) -> None:
        """One update. gradients: in the order of the parameters; each is multiplied by ``scale`` first (clipping)."""
        plain, decayed = self.advance(lr, scale)
        try:
            for (name, parameter), gradient in zip(self.parameters.items(), gradients, strict=True):
                factors = decayed if self.decays(parameter) else plain
                self.ops.adamw(parameter, gradient, self.first[name], self.second[name], factors)
        except (RuntimeError, KeyError):
            self.check()  # names what is at fault, which a kernel cannot
            raise

    def check(self) -> None:
        """LockstepError for a parameter that no update can be written into, and for moments that somebody put here and
        that are not like their parameter."""
        for name, p in self.parameters.items():
            if wrong := not_contiguous(name, p):
                raise LockstepError(wrong)
            for kind, moments in (("first", self.first), ("second", self.second)):
                found = moments.get(name)
                if found is None or (found.shape, found.dtype) != (p.shape, p.dtype) or not found.is_contiguous():
                    what = (
                        "nothing" if found is None else f"{found.dtype} {list(found.shape)}, strides {found.stride()}"
                    )
                    raise LockstepError(
                        f"optimizer.{kind}[{name!r}] is {what}: a moment is a contiguous tensor like its parameter, "
                        f"{p.dtype} {list(p.shape)}"
                    )

    def advance(self, lr: float, scale: float) -> tuple[AdamWFactors, AdamWFactors]:
        """Begin the next update: its scalars for parameters without weight decay, and for those with it."""
        self.step_count += 1
        return self.factors(scale, lr, False), self.factors(scale, lr, True)

    def decays(self, parameter: Tensor) -> bool:
        """Whether a parameter has weight decay."""
        return parameter.dim() >= 2

    def factors(self, scale: float, lr: float, decays: bool) -> AdamWFactors:
        """The scalars of update number `step_count`, for parameters with or without weight decay."""
        c, t, decay = self.config, self.step_count, lr * self.config.weight_decay if decays else 0.0
        root, rate = 1.0 / math.sqrt(1.0 - c.beta2**t), lr / (1.0 - c.beta1**t)
        return AdamWFactors(scale, c.beta1, 1.0 - c.beta1, c.beta2, 1.0 - c.beta2, root, c.eps, 1.0 - decay, rate)

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
