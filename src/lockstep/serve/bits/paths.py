"""The ways in which one sequence of tokens can go through a model. Each gives logits float32 [T, V] of its rows.

A path is a list of passes: what goes through the decoder at once, and which rows of it are the sequence's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.model import Model
from lockstep.model.pages import make_pages
from lockstep.ops import PAGE, Operators, Packed, Paged, Pages
from lockstep.serve.bits.levels import Levels

Tokens = Sequence[int]
Pick = Callable[[Tensor], Tensor]
_PADDING = 13
"""Rows of a sequence that nobody asked for."""


@dataclass(frozen=True)
class Pass:
    """One forward pass; `rows` are those of the sequence under test."""

    tokens: list[int]
    batch: Packed | Paged
    rows: slice


@dataclass(frozen=True)
class Path:
    """A way through the model: passes in order, in pages of its own where they are paged, by some threads, at a compile
    level."""

    name: str
    passes: list[Pass]
    pages: int = 0
    stale: float = 0.0
    threads: int | None = None
    level: str = "O0"


def run(levels: Levels, ops: Operators, path: Path, passed: Callable[[], None] = lambda: None) -> Tensor:
    """Logits float32 [T, V] of the sequence under test, in order of its positions. CannotCompile where the model cannot
    be compiled at the path's level. passed: called after each pass."""
    model, rows = levels.model, max(len(step.tokens) for step in path.passes)
    cache = _stale_pages(model, path) if path.pages else None
    parts = []
    with _threads(path.threads), torch.no_grad():
        forward = levels.forward(ops, path.level, cache, rows)
        for step in path.passes:
            hidden = forward(torch.tensor(step.tokens, dtype=torch.int64), step.batch)
            parts.append(model.decoder.head(ops, hidden)[step.rows])
            passed()
    return torch.cat(parts)


def paths(sequence: Tokens, others: Sequence[Tokens]) -> list[Path]:
    """Every path of the contract (C1, C2, C3) for a sequence; `others` share batches with it."""
    n = len(sequence)
    half = n // 2 or n
    alone = training(sequence)
    first, last = _packed([sequence, *others], 0), _packed([*others, sequence], len(others))
    by_chunks = _paged("prefill, chunks of 7, O2", sequence, _chunks(n, 7), others)
    decoded = _paged("decode in a batch, O2", sequence, [half, *[1] * (n - half)], others)
    return [
        *(Path(f"training, threads {count}", alone.passes, threads=count) for count in (1, 2, 4)),
        Path("training, packed first", [first]),
        Path("training, packed last", [last]),
        Path("training, padded", [_packed([sequence, [0] * _PADDING], 0)]),
        Path("training, packed last, O1", [last], level="O1"),
        _paged("prefill, whole", sequence, [n]),
        _paged("prefill, chunks of 7", sequence, _chunks(n, 7)),
        _paged("prefill, chunks of 64", sequence, _chunks(n, 64)),
        _paged("prefill in a batch", sequence, [n], others),
        _paged("decode, one by one", sequence, [1] * n),
        _paged("decode in a batch", sequence, [half, *[1] * (n - half)], others),
        _paged("verification of 4 drafts", sequence, [half, *_chunks(n - half, 4)]),
        _cache_hit(sequence),
        _paged("preempted and resumed", sequence, [half, *_chunks(n - half, 3)], stale=float("nan")),
        replace(by_chunks, level="O2"),
        replace(decoded, level="O2"),
    ]


def training(sequence: Tokens) -> Path:
    """The training forward of the sequence alone: what all others are compared with."""
    return Path("training forward", [_packed([sequence], 0)])


def _packed(sequences: Sequence[Tokens], which: int) -> Pass:
    lengths = [len(s) for s in sequences]
    start = sum(lengths[:which])
    tokens = [t for s in sequences for t in s]
    return Pass(tokens, Packed.of(lengths), slice(start, start + lengths[which]))


def _chunks(total: int, size: int) -> list[int]:
    return [min(size, total - at) for at in range(0, total, size)]


def _paged(name: str, sequence: Tokens, chunks: list[int], others: Sequence[Tokens] = (), stale: float = 0.0) -> Path:
    """The sequence chunk by chunk; in each pass the others advance too, by chunks of their own, before and after."""
    members = [*others[::2], sequence, *others[1::2]]
    which = len(others[::2])
    tables, pages = _tables(members)
    at, passes = [0] * len(members), []
    for chunk in chunks:
        sizes = [min(chunk, len(m) - a) for m, a in zip(members, at, strict=True)]
        sizes[which] = chunk
        passes.append(_advance(members, at, sizes, which, tables))
        at = [a + s for a, s in zip(at, sizes, strict=True)]
    return Path(name, passes, pages, stale)


def _cache_hit(sequence: Tokens) -> Path:
    """The first pages come from another request with the same prefix; only the rest is computed again."""
    shared = (len(sequence) - 1) // PAGE * PAGE
    tables, pages = _tables([sequence, sequence])
    tables[1][: shared // PAGE] = tables[0][: shared // PAGE]
    first = _advance([sequence], [0], [len(sequence)], 0, tables[:1])
    rest = _advance([sequence], [shared], [len(sequence) - shared], 0, tables[1:])
    return Path("prefix-cache hit", [Pass(first.tokens, first.batch, slice(0, shared)), rest], pages)


def _advance(members: Sequence[Tokens], at: list[int], sizes: list[int], which: int, tables: list[list[int]]) -> Pass:
    live = [i for i, size in enumerate(sizes) if size]
    tokens = [t for i in live for t in members[i][at[i] : at[i] + sizes[i]]]
    positions = torch.cat([torch.arange(at[i], at[i] + sizes[i], dtype=torch.int32) for i in live])
    starts = torch.tensor([0, *(sizes[i] for i in live)], dtype=torch.int32).cumsum(0).to(torch.int32)
    width = max(len(tables[i]) for i in live)
    table = torch.tensor([tables[i] + [0] * (width - len(tables[i])) for i in live], dtype=torch.int32)
    first = int(starts[live.index(which)])
    return Pass(tokens, Paged(positions, starts, table), slice(first, first + sizes[which]))


def _tables(members: Sequence[Tokens]) -> tuple[list[list[int]], int]:
    """Pages for every member, dealt out in an order that mixes them; and how many there are."""
    counts = [-(-len(m) // PAGE) for m in members]
    order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(sum(counts))).tolist()
    tables, at = [], 0
    for count in counts:
        tables.append(order[at : at + count])
        at += count
    return tables, at


def _stale_pages(model: Model, path: Path) -> list[Pages]:
    """Pages as another request left them: full of whatever `stale` is."""
    stale = lambda shape, dtype: torch.full(shape, path.stale, dtype=dtype)  # noqa: E731
    return make_pages(model.config, model.ops.numerics, path.pages, model.dtype, stale)


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
