"""Embeddings of a model without an engine: one vector for each prompt, pooled from its final hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from lockstep.model.model import check_ids
from lockstep.ops import Packed
from lockstep.serve.params import Embedding, Pooling
from lockstep.serve.pooling import Pool, Vector

if TYPE_CHECKING:
    from lockstep.model import Model


@torch.inference_mode()
def embed(model: Model, prompts: Sequence[Sequence[int]], pooling: Pooling = "mean", unit: bool = True) -> list[Vector]:
    """A float32 vector [D] for each prompt of token ids, all in one pass over the model.

    pooling: the mean over all tokens, or the last token's state. unit: scaled to length 1.
    Raises LockstepError for an empty or too long prompt, or an id outside the vocabulary.
    """
    wanted = Embedding(pooling, unit)
    ids = [check_ids(prompt, model.config) for prompt in prompts]
    if not ids:
        return []
    lengths = [len(one) for one in ids]
    model.decoder.prepare(model.ops, model.dtype)
    hidden = model.decoder(model.ops, torch.cat(ids), Packed.of(lengths), dtype=model.dtype)
    vectors = []
    for states in hidden.split(lengths):
        pool = Pool(wanted)
        pool.add(0, states.double().numpy())
        vectors.append(pool.vector())
    return vectors
