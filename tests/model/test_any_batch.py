"""Contract C1, C2 and C3 as a property: whatever shares the batch, however it is cut, wherever its pages lie, by any
number of threads, over any cached prefix and at any compile level, a token's logits have the bytes of the training
forward of its sequence alone, operator by operator.

More examples: pytest -m slow tests/model/test_any_batch.py
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lockstep.compile import Blockwise, Compiler, ServingProgram
from lockstep.model import Model, load
from lockstep.model.pages import make_pages
from lockstep.ops import PAGE, Packed, Paged
from tests.model.tiny import same_bytes, tiny
from tests.threads import threads

FAMILIES = [
    "llama3", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3",
    "deepseek_v3 absorbed",
]  # fmt: skip
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LEVELS = ("O0", "O1", "O2")
LONGEST, MOST, ROWS = 100, 3, 160
"""Tokens of a sequence, sequences side by side, and the rows a program is planned for: some batches are larger."""


class Side:
    """A model in one dtype, its pages, and its programs: blocks for training (O1), a step for serving (O2)."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.count = (MOST + 1) * -(-(LONGEST + 20) // PAGE) + 1
        stale = lambda shape, dtype: torch.full(shape, torch.nan, dtype=dtype)  # noqa: E731
        self.cache = make_pages(model.config, model.ops.numerics, self.count, model.dtype, stale)

    @cached_property
    def blocks(self) -> Blockwise:
        return Blockwise(self.model.decoder, self.model.ops, self.model.dtype, Compiler("O1"), ROWS)

    @cached_property
    def step(self) -> ServingProgram:
        model = self.model
        return ServingProgram(model.decoder, model.ops, self.cache, model.dtype, Compiler("O2"), ROWS)

    def forward(self, level: str, tokens: list[int], batch: Packed | Paged) -> Tensor:
        """Logits. Packed batches are compiled from O1 on, pages at O2."""
        model, ids = self.model, torch.tensor(tokens)
        if isinstance(batch, Packed) and level != "O0":
            with torch.enable_grad():  # blocks are compiled for training
                hidden = self.blocks(ids, batch).detach()
        elif isinstance(batch, Paged) and level == "O2":
            hidden = self.step(ids, batch)
        else:
            cache = None if isinstance(batch, Packed) else self.cache
            hidden = model.decoder(model.ops, ids, batch, cache, model.dtype)
        return model.decoder.head(model.ops, hidden)


@pytest.fixture(scope="module", params=FAMILIES)
def sides(request, tmp_path_factory) -> dict[str, Side]:
    name, _, form = request.param.partition(" ")
    path = tmp_path_factory.mktemp("model")
    tiny(name).save_pretrained(path)
    if form:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, "mla_form": form}))
    return {dtype: Side(load(path, dtype=dtype)) for dtype in DTYPES}


@dataclass(frozen=True)
class Drawn:
    """level: of the compiler. lengths of the sequences and the chunks of each; threads; padding: rows of a sequence
    that nobody asked for, in every pass; seed: of the tokens and of where pages lie; follower: tokens of a last
    sequence that begins with the first one's whole pages, taken from the cache."""

    dtype: str
    level: str
    lengths: list[int]
    chunks: list[list[int]]
    threads: int
    padding: int
    seed: int
    follower: int


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    lengths = draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=MOST))
    chunks = []
    for n in lengths:
        cuts = sorted(set(draw(st.lists(st.integers(1, n), max_size=4))) | {n})
        chunks.append([b - a for a, b in zip([0, *cuts], cuts, strict=False)])
    return Drawn(
        draw(st.sampled_from(sorted(DTYPES))), draw(st.sampled_from(LEVELS)), lengths, chunks,
        draw(st.sampled_from([1, 2, 4])), draw(st.integers(0, 3)), draw(st.integers(0, 1000)), draw(st.integers(1, 20)),
    )  # fmt: skip


def packed(side: Side, sequences: list[list[int]], d: Drawn) -> list[Tensor]:
    """All sequences in one training batch, with a sequence of padding at its end."""
    members = [*sequences, *([[0] * d.padding] if d.padding else [])]
    lengths = [len(s) for s in members]
    logits = side.forward(d.level, list(chain(*members)), Packed.of(lengths))
    return list(logits.split(lengths)[: len(sequences)])


class Pages:
    """Pages in an order drawn by a seed, full of NaN where nothing was written."""

    def __init__(self, side: Side, seed: int) -> None:
        for tensor in (tensor for layer in side.cache for tensor in vars(layer).values()):
            tensor.fill_(torch.nan)
        self.free = torch.randperm(side.count, generator=torch.Generator().manual_seed(seed)).tolist()

    def take(self, length: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-length // PAGE))]


def advance(side: Side, parts: list[tuple[list[int], int, list[int]]], spare: int, d: Drawn) -> list[Tensor]:
    """One pass. parts: tokens, the position of the first, the sequence's pages. Logits of each part."""
    members = [*parts, *([([0] * d.padding, 0, [spare])] if d.padding else [])]
    sizes = [len(tokens) for tokens, _, _ in members]
    positions = torch.cat([torch.arange(at, at + n) for (_, at, _), n in zip(members, sizes, strict=True)])
    starts = torch.tensor([0, *sizes]).cumsum(0)
    width = max(len(table) for _, _, table in members)
    table = torch.tensor([t + [0] * (width - len(t)) for _, _, t in members])
    batch = Paged(*(x.to(torch.int32) for x in (positions, starts, table)))
    tokens = [token for part, _, _ in members for token in part]
    return list(side.forward(d.level, tokens, batch).split(sizes)[: len(parts)])


def paged(side: Side, sequences: list[list[int]], d: Drawn) -> list[Tensor]:
    """Chunks of all sequences side by side, as long as each has some; then the follower, from the cached prefix."""
    *first, follower = sequences
    pages = Pages(side, d.seed)
    spare = pages.free.pop()
    tables = [pages.take(len(s)) for s in first]
    rows: list[list[Tensor]] = [[] for _ in first]
    at = [0] * len(first)
    for step in range(max(map(len, d.chunks))):
        live = [i for i, chunks in enumerate(d.chunks) if step < len(chunks)]
        parts = [(first[i][at[i] : at[i] + d.chunks[i][step]], at[i], tables[i]) for i in live]
        for i, logits in zip(live, advance(side, parts, spare, d), strict=True):
            rows[i].append(logits)
            at[i] += len(logits)
    shared = len(first[0]) // PAGE
    table = tables[0][:shared] + pages.take(len(follower) - shared * PAGE)
    rest = (follower[shared * PAGE :], shared * PAGE, table)
    (last,) = advance(side, [rest], spare, d)
    return [torch.cat(parts) for parts in rows] + [last]


@torch.no_grad()
def check(sides: dict[str, Side], d: Drawn) -> None:
    side = sides[d.dtype]
    generator = torch.Generator().manual_seed(d.seed)
    sequences = [torch.randint(0, 96, (n,), generator=generator).tolist() for n in d.lengths]
    shared = len(sequences[0]) // PAGE * PAGE
    tail = torch.randint(0, 96, (d.follower,), generator=generator).tolist()
    sequences.append(sequences[0][:shared] + tail)
    with threads(1):
        alone = [side.model.logits(s) for s in sequences]
    with threads(d.threads):
        together, cut = packed(side, sequences, d), paged(side, sequences, d)
    for i, expected in enumerate(alone):
        assert same_bytes(together[i], expected), f"sequence {i} in a packed batch"
        assert same_bytes(cut[i], expected[len(expected) - len(cut[i]) :]), f"sequence {i} in pages"


@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(d=drawn())
def test_any_batch(sides: dict[str, Side], d: Drawn) -> None:
    check(sides, d)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(d=drawn())
def test_any_batch_with_more_examples(sides: dict[str, Side], d: Drawn) -> None:
    check(sides, d)
