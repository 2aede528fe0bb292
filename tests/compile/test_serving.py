"""The serving program gives the decoder's bytes for prefill, chunks and decode, and leaves the same pages."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.compile import CannotCompile, Compiler, ServingProgram
from lockstep.compile.describe import caches_of
from lockstep.compile.stage import tensors_of
from lockstep.model.lora import add_lora
from lockstep.model.pages import make_pages
from lockstep.ops import KVPages, Paged, operators
from lockstep.ops.cut_linear import alone, cut_operators
from tests.compile.models import DTYPES, FAMILIES, decoder, same

OPS = operators("bitwise")
PAGES = 12


def pages(made, dtype):
    return make_pages(made.config, "bitwise", PAGES, dtype, lambda shape, kind: torch.zeros(shape, dtype=kind))


def step(sequences: list[tuple[int, int, list[int]]]) -> tuple[torch.Tensor, Paged]:
    """A step of sequences (first position, new tokens, pages)."""
    positions = [p for first, count, _ in sequences for p in range(first, first + count)]
    starts = torch.tensor([0, *(count for _, count, _ in sequences)]).cumsum(0)
    table = torch.zeros(len(sequences), max(len(held) for *_, held in sequences), dtype=torch.int32)
    for row, (*_, held) in zip(table, sequences, strict=True):
        row[: len(held)] = torch.tensor(held)
    tokens = torch.tensor(positions) * 7 % 96
    return tokens, Paged(torch.tensor(positions, dtype=torch.int32), starts.to(torch.int32), table)


STEPS = [
    [(0, 40, [1]), (0, 7, [2])],
    [(40, 1, [1]), (7, 1, [2])],
    [(8, 1, [2])],
    [(41, 60, [1, 3]), (9, 1, [2]), (0, 5, [4])],
    [(101, 1, [1, 3]), (10, 1, [2]), (5, 1, [4])],
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_chunks_and_decode_give_the_same_bytes(family, dtype, programs):
    made = decoder(family)
    mine, theirs = pages(made, dtype), pages(made, dtype)
    made.prepare(OPS, dtype)
    program = ServingProgram(made, OPS, mine, dtype, Compiler("O2", cache=programs), 66)
    with torch.inference_mode():
        for sequences in STEPS:
            tokens, paged = step(sequences)
            expected = made(OPS, tokens, paged, theirs, dtype)
            assert same([program(tokens, paged)], [expected])
    assert same([t for p in mine for t in tensors_of(p)], [t for p in theirs for t in tensors_of(p)])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_products_in_segments_give_the_same_bytes(family):
    """Weights whose segments are packed one by one (`canonical_tp`)."""
    ops, dtype = cut_operators(OPS, 2, 2, alone), torch.bfloat16
    made, notes = decoder(family), []
    mine, theirs = pages(made, dtype), pages(made, dtype)
    made.prepare(ops, dtype)
    program = ServingProgram(made, ops, mine, dtype, Compiler("O2", note=notes.append), 66)
    with torch.inference_mode():
        for sequences in STEPS:
            tokens, paged = step(sequences)
            assert same([program(tokens, paged)], [made(ops, tokens, paged, theirs, dtype)])
    assert not notes


def test_other_numbers_in_the_same_tensors_are_the_next_step(programs):
    """What is bound stays bound, also while another step comes in between."""
    made, dtype = decoder("llama"), torch.float32
    mine, theirs = pages(made, dtype), pages(made, dtype)
    program = ServingProgram(made, OPS, mine, dtype, Compiler("O2", cache=programs), 66)
    tokens, paged = step(STEPS[1])
    with torch.inference_mode():
        for sequences in (STEPS[0], STEPS[1], [(41, 1, [1]), (8, 1, [2])], STEPS[2], [(42, 1, [1]), (9, 1, [3])]):
            given = step(sequences)
            if len(sequences) == len(given[0]) == 2:
                tokens.copy_(given[0])
                for kept, new in zip(tensors_of(paged), tensors_of(given[1]), strict=True):
                    kept.copy_(new)
                given = tokens, paged
            assert same([program(*given)], [made(OPS, *given, theirs, dtype)])
    assert same([t for p in mine for t in tensors_of(p)], [t for p in theirs for t in tensors_of(p)])


@pytest.fixture(scope="module")
def served(programs):
    """A decoder, its pages, and its program."""
    made = decoder("qwen3").requires_grad_(False)
    cache = pages(made, torch.float32)
    compiler = Compiler("O2", cache=programs)
    return made, cache, ServingProgram(made, OPS, cache, torch.float32, compiler, 32)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 12)), min_size=1, max_size=6))
@torch.inference_mode()
def test_any_step_up_to_and_beyond_the_planned_rows(served, sequences):
    made, cache, program = served
    tokens, paged = step([(first, count, [2 * i, 2 * i + 1]) for i, (first, count) in enumerate(sequences)])
    before = [KVPages(p.k.clone(), p.v.clone()) for p in cache]
    found = program(tokens, paged).clone()
    assert same([found], [made(OPS, tokens, paged, before, torch.float32)])


def _written(weight):
    weight.mul_(2.0)


def _given_other_memory(weight):
    weight.data = weight.data * 2.0


@pytest.mark.parametrize("change", [_written, _given_other_memory, None], ids=["written", "other memory", "another"])
def test_a_new_weight_is_noticed(programs, change):
    made, notes = decoder("llama"), []
    compiler = Compiler("O2", note=notes.append, cache=programs)
    program = ServingProgram(made, OPS, pages(made, torch.float32), torch.float32, compiler, 8)
    tokens, paged = step([(0, 5, [1])])
    with torch.no_grad():
        before = program(tokens, paged).clone()
        up = made.layers[1].mlp.up
        if change is None:
            up.weight = torch.nn.Parameter(up.weight * 2.0)
            tokens, paged = step([(0, 5, [1])])
        else:
            change(up.weight)
        found = program(tokens, paged).clone()
        assert not same([found], [before])
        fresh = copy.deepcopy(made)
        for part in fresh.modules():
            for cache in caches_of(part).values():
                cache.clear()
        assert same([found], [fresh(OPS, tokens, paged, pages(made, torch.float32), torch.float32)])
        assert same([found], [made(OPS, tokens, paged, pages(made, torch.float32), torch.float32)])
    assert ("the model was changed" if change is None else "the weights were changed") in notes[0]


def test_a_changed_model_is_noticed_and_a_hook_is_called(programs):
    """An adapter, a window, another block, and at last a hook, with which operators run one by one."""
    made, notes, seen = decoder("mistral"), [], []
    compiler = Compiler("O2", note=notes.append, cache=programs)
    program = ServingProgram(made, OPS, pages(made, torch.float32), torch.float32, compiler, 20)

    def check(count):
        tokens, paged = step([(0, 20, [1])])
        with torch.inference_mode():
            expected = made(OPS, tokens, paged, pages(made, torch.float32), torch.float32)
            assert same([program(tokens, paged)], [expected])
        assert len(notes) == count, notes

    check(0)
    add_lora(made, 4, 8.0, ["v_proj"])
    made.layers[1].attn.v.lora.b.data.normal_()
    check(1)
    made.layers[2].attn.window = 3
    check(2)
    made.layers[0].mlp = copy.deepcopy(made.layers[1].mlp)
    check(3)
    made.layers[1].mlp.register_forward_hook(lambda *_: seen.append(True))
    check(5)
    assert len(seen) == 2
    assert all("the model was changed after it was compiled: compiling again" in note for note in notes[:4])
    assert (
        notes[4]
        == "operators run one by one (O0), a step cannot be compiled: the model has hooks, which programs do not call"
    )


def test_a_model_with_hooks_is_not_served_as_a_program():
    made, dtype = decoder("llama"), torch.float32
    made.layers[1].mlp.register_forward_hook(lambda *_: None)
    with pytest.raises(CannotCompile, match="hooks"):
        ServingProgram(made, OPS, pages(made, dtype), dtype, Compiler("O2"), 8)
