"""A model that can be used: decoder, tokenizer and operators together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model.decoder import Decoder
from lockstep.model.export import save_model
from lockstep.model.tokenizer import Tokenizer
from lockstep.ops import Operators, Packed

_HEAD_ROWS = 512
"""Rows of logits computed at a time where only log-probabilities are kept: a vocabulary's row is large."""


class Model:
    """A decoder with its tokenizer, the operators it computes with and its compute dtype. Made by `load`."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | Callable[[], Tokenizer] | None,
        ops: Operators,
        dtype: torch.dtype,
    ):
        """tokenizer: it, or what reads it when it is first asked for (parsing one takes longer than mapping the
        weights), or None for a model without."""
        self.decoder, self.ops, self.dtype = decoder, ops, dtype
        self._tokenizer = tokenizer

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """Read on first use. LockstepError where the model has none, or it is damaged or does not fit the model."""
        if self._tokenizer is None:
            raise LockstepError(
                "this model came without a tokenizer (its directory has no tokenizer.json): "
                "give token ids instead of text, or put the tokenizer's files beside the weights and load it again"
            )
        if not isinstance(self._tokenizer, Tokenizer):
            self._tokenizer = self._tokenizer()
        return self._tokenizer

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """The training forward over one sequence of T ids: float32 [T, V], row t predicting token t + 1."""
        return self._head(self._hidden(token_ids))

    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """log p(token t + 1 | tokens 0..t) for a sequence of T ids, teacher-forced: float32 [T - 1]."""
        hidden = self._hidden(token_ids)[:-1]
        targets = torch.tensor(list(token_ids)[1:], dtype=torch.int64)
        parts = [
            self.ops.select_logprobs(self._head(hidden[i : i + _HEAD_ROWS]), targets[i : i + _HEAD_ROWS])
            for i in range(0, len(targets), _HEAD_ROWS)
        ]
        return torch.cat(parts) if parts else torch.empty(0)

    def save(self, path: str | Path, force: bool = False) -> None:
        """Write a Hugging Face directory that `load` and `transformers` read; weights in the compute dtype.

        Written beside and renamed, so a failure leaves nothing half written. An existing directory is replaced
        only if it is empty or an earlier export; force replaces any.
        """
        save_model(self, path, force=force)

    @torch.no_grad()
    def _hidden(self, token_ids: Sequence[int]) -> Tensor:
        ids = check_ids(token_ids, self.config)
        self.decoder.prepare(self.ops, self.dtype)
        return self.decoder(self.ops, ids, Packed.of([len(ids)]), dtype=self.dtype)

    @torch.no_grad()
    def _head(self, hidden: Tensor) -> Tensor:
        return self.decoder.head(self.ops, hidden)


def check_ids(token_ids: Sequence[int], config: ModelConfig) -> Tensor:
    """int64 [T]; LockstepError for no token, a token outside the vocabulary, or more tokens than positions."""
    if isinstance(token_ids, str):
        raise LockstepError(f"token_ids is the text {token_ids!r:.60}: give model.tokenizer.encode(text)")
    try:
        ids = torch.as_tensor(token_ids).flatten()
    except (TypeError, ValueError, RuntimeError) as error:
        raise LockstepError(f"token_ids is {token_ids!r:.60}: give one sequence of whole numbers ({error})") from error
    if len(ids) == 0:
        raise LockstepError("token_ids is empty: give at least one token")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise LockstepError(f"token_ids holds {ids.dtype} values: give whole numbers, as model.tokenizer.encode does")
    ids = ids.to(torch.int64)
    if len(ids) > config.max_positions:
        raise LockstepError(
            f"token_ids has {len(ids)} tokens, but the model has max_positions = {config.max_positions}: shorten it"
        )
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= config.vocab_size:
        wrong = low if low < 0 else high
        raise LockstepError(f"token id {wrong} is outside the vocabulary: ids go from 0 to {config.vocab_size - 1}")
    return ids
