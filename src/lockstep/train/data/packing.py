"""Packing documents into training sequences, and sequences into the batch that the model reads.

A batch has no padding, so a sequence may be shorter than ``seq_len``. A document longer than that is cut into
pieces; pieces that are shorter are packed by best fit, longest first (Ding et al., 2024, "Fewer truncations
improve language modeling"), so no document that fits is ever cut. Every piece starts at position 0 and sees
only itself.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lockstep.ops import Packed
from lockstep.train.data.tokens import Tokens


@dataclass(frozen=True)
class Sequences:
    """The packing: sequence ``i`` is the pieces ``offsets[i] .. offsets[i + 1]``.

    starts, lengths: int64 [pieces], in the token file. offsets: int64 [sequences + 1].
    """

    starts: np.ndarray
    lengths: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1


@dataclass(frozen=True)
class Batch:
    """What one forward pass reads: T tokens, int64 [T]; targets int64 [T], -1 where no loss is taken."""

    tokens: Tensor
    targets: Tensor
    packed: Packed

    @property
    def loss_tokens(self) -> int:
        return int((self.targets >= 0).sum())


def pack(documents: np.ndarray, seq_len: int) -> Sequences:
    """Pack documents, int64 [D, 2] of (start, end) in the token file, into sequences of at most ``seq_len``.

    The last token of a document has no target, so a document of n tokens has n - 1 inputs.
    """
    pieces = [
        (start, min(seq_len, end - 1 - start))
        for first, end in documents.tolist()
        for start in range(first, end - 1, seq_len)
    ]
    bins = _best_fit([length for _, length in pieces], seq_len)
    order = [i for members in bins for i in members]
    offsets = np.zeros(len(bins) + 1, dtype=np.int64)
    offsets[1:] = np.cumsum([len(members) for members in bins])
    chosen = [pieces[i] for i in order]
    return Sequences(
        np.array([p[0] for p in chosen], dtype=np.int64),
        np.array([p[1] for p in chosen], dtype=np.int64),
        offsets,
    )


def _best_fit(lengths: list[int], capacity: int) -> list[list[int]]:
    """Best-fit decreasing: each item goes where the least room is left that still holds it."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (room left, bin), sorted
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[item]
        at = bisect_left(room, (length, 0))
        if at == len(room):
            bins.append([item])
            left, target = capacity - length, len(bins) - 1
        else:
            left, target = room.pop(at)
            bins[target].append(item)
            left -= length
        if left > 0:
            place = (left, target)
            room.insert(bisect_left(room, place), place)
    return bins


def batch_of(tokens: Tokens, sequences: Sequences, indices: list[int]) -> Batch:
    """The batch of these sequences, back to back."""
    pieces = [p for i in indices for p in range(sequences.offsets[i], sequences.offsets[i + 1])]
    inputs, targets, lengths = [], [], []
    for piece in pieces:
        start, length = int(sequences.starts[piece]), int(sequences.lengths[piece])
        inputs.append(tokens.ids[start : start + length].astype(np.int64))
        targets.append(_targets(tokens, start + 1, length))
        lengths.append(length)
    return Batch(
        torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(np.concatenate(targets)), Packed.of(lengths)
    )


def _targets(tokens: Tokens, start: int, length: int) -> np.ndarray:
    targets = tokens.ids[start : start + length].astype(np.int64)
    if tokens.counts is not None:
        targets[tokens.counts[start : start + length] == 0] = -1
    return targets
