"""Evaluation on held-out text: mean loss and bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lockstep.model.decoder import Decoder
from lockstep.train.data import Batch, Dataset
from lockstep.train.step import Compute, logprob_sum
from lockstep.train.tree import tree_total


@dataclass(frozen=True)
class Evaluation:
    """loss: nats per token. bits_per_byte: loss / ln 2 per UTF-8 byte of the text, comparable across tokenizers."""

    loss: float
    bits_per_byte: float
    tokens: int


@torch.no_grad()
def evaluate(decoder: Decoder, compute: Compute, data: Dataset, sequences: int, micro_batch: int) -> Evaluation | None:
    """The loss on the held-out documents, at most so many sequences of them; None if nothing is held out."""
    sums, batches = [], list(data.held_out_batches(sequences, micro_batch))
    for batch in batches:
        hidden = decoder(compute.ops, batch.tokens, batch.packed, dtype=compute.dtype)
        weights = torch.ones(batch.targets.shape, dtype=torch.float32)
        _, logprobs = compute.ops.linear_cross_entropy(
            hidden, decoder.head_weight, batch.targets, weights, softcap=decoder.logit_softcap
        )
        sums.append(logprob_sum(logprobs, batch.targets))
    return evaluation(sums, batches, data)


def evaluation(sums: list[float], batches: list[Batch], data: Dataset) -> Evaluation | None:
    """The result from each batch's sum of log-probabilities; None without a token to predict."""
    tokens = sum(batch.loss_tokens for batch in batches)
    if tokens == 0:
        return None
    loss = -tree_total(sums) / tokens
    return Evaluation(loss, loss / math.log(2) / data.bytes_per_token, tokens)
