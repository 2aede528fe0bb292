"""Embeddings: one vector for a text, pooled from its tokens' final hidden states (after the final norm).

A hidden state depends on its own sequence alone, and pooling adds in the order of the tokens in float64: an
embedding has the same bytes whatever it was computed beside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model.model import check_ids
from lockstep.ops import Packed

if TYPE_CHECKING:
    from lockstep.model import Model

Pooling = Literal["mean", "last"]
Vector = NDArray[np.float32]


def embed(model: Model, prompts: Sequence[Sequence[int]], pooling: Pooling = "mean", unit: bool = True) -> list[Vector]:
    """A float32 vector [D] for each prompt of token ids, all in one pass over the model.

    pooling: the mean over all tokens, or the last token's state. unit: scaled to length 1.
    Raises LockstepError for an empty or too long prompt, or an id outside the vocabulary.
    """

    def forward(tokens: Tensor, batch: Packed) -> Tensor:
        hidden: Tensor = model.decoder(model.ops, tokens, batch, dtype=model.dtype)
        return hidden

    model.decoder.prepare(model.ops, model.dtype)
    return embed_with(forward, model.config, prompts, pooling, unit)


@torch.inference_mode()
def embed_with(
    forward: Callable[[Tensor, Packed], Tensor],
    config: ModelConfig,
    prompts: Sequence[Sequence[int]],
    pooling: Pooling,
    unit: bool,
) -> list[Vector]:
    """`embed` by any forward pass to the final hidden states [T, D]."""
    if pooling not in get_args(Pooling):
        raise LockstepError(f"pooling is {pooling!r}: give one of {', '.join(get_args(Pooling))}.")
    ids = [check_ids(prompt, config) for prompt in prompts]
    if not ids:
        return []
    lengths = [len(one) for one in ids]
    hidden = forward(torch.cat(ids), Packed.of(lengths))
    return [_pooled(states.double().numpy(), pooling, unit) for states in hidden.split(lengths)]


def _pooled(states: NDArray[np.float64], pooling: Pooling, unit: bool) -> Vector:
    """states [T, D] -> [D]. Down a column NumPy adds row by row."""
    vector = states[-1] if pooling == "last" else np.add.reduce(states, axis=0) / len(states)
    if unit:
        length = math.sqrt(math.fsum(vector * vector))  # fsum: rounded once, in no order
        vector = vector / length if length else vector
    return vector.astype(np.float32)
