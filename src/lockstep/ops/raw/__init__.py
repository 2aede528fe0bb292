"""The raw operators `torch.ops.lockstep.*`: their schemas and what they give on meta and fake tensors.

Importing this defines them; the kernels come with `ops.build.load`. So a graph can be captured and a model run on
meta tensors where nothing can be built. Every operator that allocates its results has a second form `.out`, in
PyTorch's convention, that writes them into tensors of the caller: the same kernel, the same bits.
"""

from lockstep.ops.raw import attention, fused, latent, linear, moe, norm, optimizer, rows, vocabulary
from lockstep.ops.raw.define import define, kernel, rounded

__all__ = [
    "attention", "define", "fused", "kernel", "latent", "linear", "moe", "norm", "optimizer", "rounded",
    "rows", "vocabulary",
]  # fmt: skip
