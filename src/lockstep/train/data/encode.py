"""A document's tokens, and which of them take loss."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

from lockstep.errors import LockstepError
from lockstep.model.tokenizer import Tokenizer
from lockstep.train.data.sources import Document
from lockstep.train.data.tokens import Encoded

_AT_ONCE = 64


def encode(documents: Iterable[tuple[Document, bool]], tokenizer: Tokenizer, assistant_only: bool) -> Iterator[Encoded]:
    """Encode documents with their held-out flags.

    Text: the tokenizer's start token (if it has one), the text, and its end token. Chat: as the template says.
    """
    stream = iter(documents)
    while group := list(islice(stream, _AT_ONCE)):
        plain = [d.text for d, _ in group if not d.messages]
        texts = iter(tokenizer.backend.encode_batch(plain, add_special_tokens=True))
        for document, held_out in group:
            size = len(document.plain.encode())
            if document.messages:
                ids, counts = _chat(document, tokenizer, assistant_only)
                shown = ids if counts is None else [i for i, c in zip(ids, counts, strict=True) if c]
                scored = len(tokenizer.decode(shown, skip_special=False).encode())
                yield Encoded(ids, counts, size, scored, held_out)
            else:
                yield Encoded(_enclosed(next(texts).ids, tokenizer), None, size, size, held_out)


def _enclosed(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    if tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids = [tokenizer.bos_id, *ids]
    if tokenizer.eos_ids and (not ids or ids[-1] not in tokenizer.eos_ids):
        ids = [*ids, min(tokenizer.eos_ids)]
    return ids


def _chat(document: Document, tokenizer: Tokenizer, assistant_only: bool) -> tuple[list[int], list[int] | None]:
    messages = list(document.messages)
    ids = tokenizer.chat(messages, add_generation_prompt=False)
    if not assistant_only:
        return ids, None
    counts = [0] * len(ids)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before = _prefix(tokenizer, messages[:i], True, ids)
            after = _prefix(tokenizer, messages[: i + 1], False, ids)
            counts[before:after] = [1] * (after - before)
    return ids, counts


def _prefix(tokenizer: Tokenizer, messages: list[dict], prompt: bool, whole: list[int]) -> int:
    """The number of tokens of the first messages, which must be how the whole conversation begins."""
    ids = tokenizer.chat(messages, add_generation_prompt=prompt)
    if whole[: len(ids)] != ids:
        raise LockstepError(
            "data.assistant_only: this chat template renders the first messages of a conversation differently "
            "when more follow, so the assistant's tokens cannot be told apart: set it to false"
        )
    return len(ids)
