"""The optimizer's update and the sum of squares of a gradient under the bit contract: `csrc/optimizer.cpp`.

Both give the bits of their plain forms (`ops.plain`), which are made of single elementwise operations.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.ops.raw import kernel


@dataclass(frozen=True)
class AdamWFactors:
    """The scalars of one AdamW update (Loshchilov and Hutter, 2019), float64; each is rounded to float32 at use.

    g' = scale g; m = beta1 m + rest1 g'; v = beta2 v + rest2 g'^2; p = keep p - lr m / (root sqrt(v) + eps).
    rest: 1 - beta. root: 1 / sqrt(1 - beta2^t). lr: rate / (1 - beta1^t). keep: 1 - rate * weight_decay.
    """

    scale: float
    beta1: float
    rest1: float
    beta2: float
    rest2: float
    root: float
    eps: float
    keep: float
    lr: float


def adamw(p: Tensor, g: Tensor, m: Tensor, v: Tensor, f: AdamWFactors) -> None:
    """Update p, m and v (float32, contiguous, one shape) in place by the gradient g."""
    kernel.adamw(
        p.detach(), g.contiguous(), m, v, f.scale, f.beta1, f.rest1, f.beta2, f.rest2, f.root, f.eps, f.keep, f.lr
    )
    torch.autograd.graph.increment_version(p)  # the kernel writes past autograd; caches of the weight must see it


def square_sum(x: Tensor) -> Tensor:
    """The sum of squares of x (float32), a float64 scalar; squares of float32 are exact in float64."""
    total: Tensor = kernel.square_sum(x.detach().contiguous())
    return total
