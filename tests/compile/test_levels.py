"""O0 = O1 = O2 in bytes (contract C3): loss, log-probabilities and every gradient, for every family and batch."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.compile import Blockwise, Compiler, MicroBatch
from lockstep.memory.arena import lower_bound, without_reuse
from lockstep.memory.overlap import check
from lockstep.model.lora import add_lora
from lockstep.ops import operators
from tests.compile.models import DTYPES, FAMILIES, batch, decoder, differentiate, eager, same
from tests.threads import threads

OPS = operators("bitwise")
BATCHES = ([5, 17, 40], [1], [2, 2], [96])
"""Lengths of sequences: one compiled program serves them all."""
LONG = [120, 128, 90, 110]


def whole(made, compiler, dtype, rows=96, z_loss=0.0):
    parameters = {name: p for name, p in made.named_parameters() if p.requires_grad}
    return MicroBatch(made, OPS, dtype, parameters, z_loss, compiler, rows)


def run(program, made, lengths):
    tokens, targets, packed, weights = batch(lengths)
    gradients = [torch.full_like(p, torch.nan) for p in made.parameters() if p.requires_grad]
    objective, logprobs = program.run(tokens, targets, packed, weights, gradients, made.config.router_aux_loss)
    return [torch.tensor(objective, dtype=torch.float32), logprobs.clone(), *gradients]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_level_gives_the_same_bytes(family, dtype, programs):
    made = decoder(family)
    compiler = Compiler("O2", cache=programs)
    blockwise, program = Blockwise(made, OPS, dtype, compiler, 96), whole(made, compiler, dtype, z_loss=0.1)
    for lengths in BATCHES:
        expected = eager(made, OPS, dtype, lengths, z_loss=0.1)
        tokens, targets, packed, weights = batch(lengths)
        routed = []
        hidden = blockwise(tokens, packed, routed)
        assert same(differentiate(made, OPS, hidden, targets, weights, 0.1, routed), expected)
        assert same(run(program, made, lengths), expected)


@pytest.fixture(scope="module", params=["gemma3", "qwen3_moe"])
def compiled(request, programs):
    made, compiler = decoder(request.param), Compiler("O2", cache=programs)
    return made, Blockwise(made, OPS, torch.bfloat16, compiler, 96), whole(made, compiler, torch.bfloat16)


@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.integers(1, 32), min_size=1, max_size=3), count=st.sampled_from([1, 2, 4]))
def test_any_batch_on_any_threads_gives_the_same_bytes(compiled, lengths, count):
    made, blockwise, program = compiled
    with threads(1):
        expected = eager(made, OPS, torch.bfloat16, lengths)
    tokens, targets, packed, weights = batch(lengths)
    routed = []
    with threads(count):
        hidden = blockwise(tokens, packed, routed)
        assert same(differentiate(made, OPS, hidden, targets, weights, routed=routed), expected)
        assert same(run(program, made, lengths), expected)


@pytest.mark.parametrize("targets", [["q_proj", "down_proj"], ["v_proj"]])
def test_adapters_train_with_the_same_bytes(targets):
    made = decoder("llama", tie_embeddings=False)
    add_lora(made, 4, 8.0, targets)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("lora.b"):
                parameter.normal_()
    compiler = Compiler("O2")
    blockwise, program = Blockwise(made, OPS, torch.bfloat16, compiler, 96), whole(made, compiler, torch.bfloat16)
    # The first block's input has no gradient: it is another kind than the others.
    assert [report.name for report in compiler.reports].count("block") == 2
    expected = eager(made, OPS, torch.bfloat16, [20, 30])
    tokens, labels, packed, weights = batch([20, 30])
    assert same(differentiate(made, OPS, blockwise(tokens, packed), labels, weights), expected)
    assert same(run(program, made, [20, 30]), expected)


def test_threads_compile_and_run_beside_each_other():
    """Tracing patches modules for the whole process: three threads trace while a fourth computes."""
    families = ["llama", "qwen3", "mistral"]
    made = [decoder(family) for family in families]
    expected = [eager(one, OPS, torch.float32, [20, 30]) for one in made]
    with ThreadPoolExecutor(4) as pool:
        programs = [pool.submit(whole, one, Compiler("O2"), torch.float32) for one in made]
        beside = copy.deepcopy(made[0])
        while not all(program.done() for program in programs):
            assert same(eager(beside, OPS, torch.float32, [20, 30]), expected[0])
    for one, program, bytes_of_one in zip(made, programs, expected, strict=True):
        assert same(run(program.result(), one, [20, 30]), bytes_of_one)


def test_identical_blocks_are_captured_once_and_others_are_not_merged():
    compiler = Compiler("O1")
    Blockwise(decoder("llama", num_layers=6), OPS, torch.float32, compiler, 32)
    assert [report.name for report in compiler.reports] == ["block"]
    windows = Compiler("O1")
    Blockwise(decoder("gemma3"), OPS, torch.float32, windows, 32)
    assert [report.name for report in windows.reports] == ["block", "block"], "sliding and full layers"


def test_a_step_dispatches_no_operator_from_python(programs):
    class Count(TorchDispatchMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
            self.names.append(str(function))
            return function(*arguments, **(kwargs or {}))

    counts = []
    for layers in (2, 6):
        made = decoder("llama", num_layers=layers)
        program = whole(made, Compiler("O2", cache=programs), torch.float32)
        tokens, targets, packed, weights = batch([30])
        gradients = [torch.empty_like(p) for p in made.parameters()]
        with Count() as counted:
            counted.names.clear()
            program.run(tokens, targets, packed, weights, gradients)
        assert not any("lockstep" in name for name in counted.names), counted.names
        # What is left touches what comes in and goes out: a detach of every tensor that is bound.
        counts.append(len([name for name in counted.names if "detach" not in name]))
    assert counts[0] == counts[1] <= 4


def test_the_memory_plan_is_sound_and_small(programs):
    program = whole(decoder("llama", num_layers=8), Compiler("O2", cache=programs), torch.bfloat16, rows=512)
    buffers, arena = program.memory.plan()
    assert check(buffers, arena) == []
    assert arena.peak <= 1.05 * lower_bound(buffers)
    assert arena.peak <= 0.6 * without_reuse(buffers)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_gradients_lie_where_nothing_is_needed_any_more(family, programs):
    """Same bytes, less memory than with gradients of their own, no place of another buffer while that is in use."""
    made = decoder(family, num_layers=8)
    program = whole(made, Compiler("O2", cache=programs), torch.bfloat16, rows=512)
    places = program.place_of_gradients
    tokens, targets, packed, weights = batch(LONG)
    for _ in range(2):
        objective, logprobs = program.run(tokens, targets, packed, weights, places, made.config.router_aux_loss)
        found = [torch.tensor(objective, dtype=torch.float32), logprobs, *places]
        assert same(found, eager(made, OPS, torch.bfloat16, LONG))
    inner = program.program.value(program._stitch.memory)
    begin, end = inner.data_ptr(), inner.data_ptr() + program.memory.size
    within = [p for p in places if begin <= p.data_ptr() < end]
    assert sum(p.nbytes for p in within) > (0.5 if family == "llama" else 0.1) * sum(p.nbytes for p in places)
    calls = program._stitch.written
    names = [name for name, p in made.named_parameters() if p.requires_grad]
    buffers, arena = program.memory.plan()
    for name, place in zip(names, places, strict=True):
        at = place.data_ptr() - begin
        for buffer, offset in zip(buffers, arena.offsets, strict=True):
            apart = at + place.nbytes <= offset or offset + buffer.size <= at
            assert apart or buffer.last < calls[name], name


def test_a_change_after_compiling_is_noticed(programs):
    made, notes = decoder("mistral"), []
    compiler = Compiler("O2", note=notes.append, cache=programs)
    blockwise, program = Blockwise(made, OPS, torch.float32, compiler, 96), whole(made, compiler, torch.float32)
    tokens, targets, packed, weights = batch([40])
    blockwise(tokens, packed)
    assert not notes
    assert program.unchanged
    made.layers[1].attn.window = 3
    assert not program.unchanged
    expected = eager(made, OPS, torch.float32, [40])
    assert same(differentiate(made, OPS, blockwise(tokens, packed), targets, weights), expected)
    assert "changed after it was compiled" in notes[0]
    made.layers[0].mlp.up.weight = torch.nn.Parameter(made.layers[0].mlp.up.weight.detach().clone())
    assert same(
        differentiate(made, OPS, blockwise(tokens, packed), targets, weights), eager(made, OPS, torch.float32, [40])
    )
    assert len(notes) == 2


def test_weights_written_in_place_are_no_change(programs):
    made = decoder("llama")
    program = whole(made, Compiler("O2", cache=programs), torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.mul_(0.5)
    assert program.unchanged
    assert same(run(program, made, [40]), eager(made, OPS, torch.float32, [40]))
