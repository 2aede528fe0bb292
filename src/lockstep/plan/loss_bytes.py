"""Bytes of the logits and of what else is by the row of the batch: the loss, its gradients, the tokens."""

from __future__ import annotations

import numpy as np

from lockstep.plan.columns import Column, Columns
from lockstep.plan.kept_bytes import message_bytes

CHUNK = 2**23
"""Logits that a chunked loss holds at a time (``ops.cross_entropy``)."""


def logits_bytes(rows: Columns) -> Column:
    """What the loss takes: 16-bit product, float32 logits and their gradient; in chunks, with the head's gradient made
    in the forward and its weight packed twice (``ops.raw.vocabulary.workspace``). Where ranks share the vocabulary,
    each one's gradient of the input is float32 until it is summed, that of a chunk's rows twice."""
    whole = rows.head_tokens * rows.vocab / rows.tp * (2 + 4 + 4)
    chunk = np.minimum(rows.head_tokens * rows.vocab / rows.tp, CHUNK)
    # The gradient of a chunk lies where its logits did; where ranks share the vocabulary, beside them.
    worked = chunk * np.where(rows.tp > 1, 4 + 2, 4) + 2 * 2 * rows.vocab * rows.hidden / rows.tp
    chunked = worked + loss_gradients(rows)
    at_once = np.minimum(rows.head_tokens, CHUNK * rows.tp / rows.vocab)  # rows of a chunk
    chunked = chunked + np.where(rows.tp > 1, 4 * (rows.head_tokens + at_once) * rows.hidden, 0.0)
    return np.where(rows.kept_logits > 0, whole, chunked)


def loss_gradients(rows: Columns) -> Column:
    """What the chunked loss keeps of a micro-batch until its backward: the gradients of the head and of its input, and
    the stream that the last norm reads."""
    kept = 4 * rows.vocab * rows.hidden / rows.tp + 2 * rows.head_tokens * rows.hidden + message_bytes(rows)
    return np.where(rows.kept_logits > 0, 0.0, kept)


def head_input_bytes(rows: Columns) -> Column:
    """What goes into the head, 16-bit: where ranks share rows out, their own and all of them."""
    split = np.where(rows.sequence_parallel > 0, rows.tp, 1.0)
    gathered = np.where(rows.ours & (rows.cp * split > 1), rows.head_tokens, 0.0)
    return 2 * rows.hidden * (rows.tokens / split + gathered)


def token_bytes(rows: Columns) -> Column:
    """Of this system: tokens and targets (int64) and positions (int32) of a step's global batch, on every rank."""
    return np.where(rows.ours, 20 * rows.seq * rows.micro_batch * rows.micro_batches * rows.dp, 0.0)
