"""Packing: nothing lost, nothing twice, no document cut that fits, targets within the document."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.train.data import batch_of, pack
from lockstep.train.data.tokens import Encoded, Tokens, write_tokens


def spans(lengths: list[int]) -> np.ndarray:
    ends = np.cumsum(lengths)
    return np.stack([ends - np.array(lengths), ends], axis=1).astype(np.int64).reshape(-1, 2)


@given(st.lists(st.integers(1, 70), min_size=1, max_size=40), st.integers(8, 24))
@settings(max_examples=200, deadline=None)
def test_every_input_token_is_in_one_sequence(lengths: list[int], seq_len: int) -> None:
    documents = spans(lengths)
    packed = pack(documents, seq_len)
    covered = np.concatenate(
        [np.arange(s, s + n) for s, n in zip(packed.starts, packed.lengths, strict=True)] or [np.zeros(0)]
    )
    # All tokens but the last of each document are inputs.
    wanted = np.concatenate([np.arange(a, b - 1) for a, b in documents])
    assert sorted(covered) == sorted(wanted)
    for i in range(len(packed)):
        assert 0 < packed.lengths[packed.offsets[i] : packed.offsets[i + 1]].sum() <= seq_len


@given(st.lists(st.integers(2, 17), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_documents_that_fit_are_not_cut(lengths: list[int]) -> None:
    packed = pack(spans(lengths), 16)
    assert sorted(packed.lengths) == sorted(n - 1 for n in lengths)


def tokens(tmp_path: Path, documents: list[list[int]], counts: list[list[int]] | None = None) -> Tokens:
    kept = counts or [None] * len(documents)  # type: ignore[list-item]
    encoded = [Encoded(ids, k, len(ids), len(ids), False) for ids, k in zip(documents, kept, strict=True)]
    return write_tokens(tmp_path, "key", 300, counts is not None, encoded, lambda done: None)


def test_a_batch_restarts_positions_and_never_crosses_documents(tmp_path: Path) -> None:
    found = tokens(tmp_path, [[1, 2, 3, 4, 5], [11, 12, 13], [21, 22]])
    batch = batch_of(found, pack(found.documents, 8), [0])
    assert batch.tokens.tolist() == [1, 2, 3, 4, 11, 12, 21]
    assert batch.targets.tolist() == [2, 3, 4, 5, 12, 13, 22]
    assert batch.packed.positions.tolist() == [0, 1, 2, 3, 0, 1, 0]
    assert batch.packed.starts.tolist() == [0, 4, 6, 7]


def test_a_cut_document_keeps_the_target_at_the_cut(tmp_path: Path) -> None:
    found = tokens(tmp_path, [list(range(20))])
    packed = pack(found.documents, 8)
    batches = [batch_of(found, packed, [i]) for i in range(len(packed))]
    pairs = sorted((int(a), int(b)) for batch in batches for a, b in zip(batch.tokens, batch.targets, strict=True))
    assert pairs == [(i, i + 1) for i in range(19)]


def test_tokens_that_do_not_count_have_no_target(tmp_path: Path) -> None:
    found = tokens(tmp_path, [[1, 2, 3, 4]], [[0, 0, 1, 1]])
    batch = batch_of(found, pack(found.documents, 8), [0])
    assert batch.targets.tolist() == [-1, 3, 4]
    assert batch.loss_tokens == 2


@pytest.mark.parametrize(("vocab", "dtype"), [(65536, "uint16"), (65537, "uint32")])
def test_token_width(tmp_path: Path, vocab: int, dtype: str) -> None:
    found = write_tokens(tmp_path, "k", vocab, False, [Encoded([vocab - 1], None, 1, 1, False)], lambda done: None)
    assert found.about.dtype == dtype
    assert found.ids[0] == vocab - 1
