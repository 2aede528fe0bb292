"""The data of a run as the trainer sees it: global batches by step, held-out batches, and how much there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.errors import LockstepError
from lockstep.train.data.order import batch_at
from lockstep.train.data.packing import Batch, Sequences, batch_of, pack
from lockstep.train.data.tokens import Tokens


@dataclass(frozen=True)
class Dataset:
    """Packed training and held-out sequences over one token file."""

    tokens: Tokens
    training: Sequences
    held_out: Sequences
    seed: int

    def global_batch(self, step: int, micro_batch: int, micro_batches: int) -> list[Batch]:
        """The canonical micro-batches of update ``step`` (0-based): a function of (seed, step) alone."""
        chosen = batch_at(self.seed, step, micro_batch * micro_batches, len(self.training))
        groups = [chosen[i : i + micro_batch] for i in range(0, len(chosen), micro_batch)]
        return [batch_of(self.tokens, self.training, group) for group in groups]

    def held_out_batches(self, sequences: int, micro_batch: int) -> Iterator[Batch]:
        """The first held-out sequences (in an order that is mixed once, by a fixed key), at most so many."""
        count = len(self.held_out)
        chosen = batch_at(0, 0, min(sequences, count), count) if count else []
        for i in range(0, len(chosen), micro_batch):
            yield batch_of(self.tokens, self.held_out, chosen[i : i + micro_batch])

    @property
    def bytes_per_token(self) -> float:
        """UTF-8 bytes of scored held-out text per token that is predicted in it."""
        counts, sequences = self.tokens.counts, self.held_out
        predicted = int(sequences.lengths.sum())
        if counts is not None:
            pieces = zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True)
            predicted = sum(int(counts[start + 1 : start + 1 + length].sum()) for start, length in pieces)
        return self.tokens.about.held_out_bytes / max(predicted, 1)

    @property
    def training_tokens(self) -> int:
        """Tokens that one epoch trains on."""
        return int(self.training.lengths.sum())


def dataset(tokens: Tokens, seq_len: int, seed: int) -> Dataset:
    """Pack a token file. Raises `LockstepError` when the training part does not fill one sequence."""
    training = pack(tokens.documents[~tokens.held_out], seq_len)
    available = int(training.lengths.sum())
    if available < seq_len:
        raise LockstepError(
            f"the corpus has {available} training tokens, less than one sequence of data.seq_len {seq_len}: "
            "give more text in data.sources, or lower data.seq_len"
        )
    return Dataset(tokens, training, pack(tokens.documents[tokens.held_out], seq_len), seed)
