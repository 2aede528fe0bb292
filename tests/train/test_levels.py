"""Twenty steps at O0, O1 and O2: the same losses, norms, weights and moments, byte for byte, for every family."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.compile.models import DTYPES, FAMILIES, decoder, same

from lockstep.config import CompileConfig, Config
from lockstep.model.lora import add_lora
from lockstep.ops import Packed, operators
from lockstep.train.data import Batch
from lockstep.train.execution import execution
from lockstep.train.optimizer import AdamW, clip_scale
from lockstep.train.step import Compute
from lockstep.train.trainer import Trainer

OPS = operators("bitwise")
STEPS, ROWS = 20, 48


def batches(step: int) -> list[Batch]:
    """Three micro-batches of different lengths (the tree is not a full one); now and then one that is too large."""
    generator, found = torch.Generator().manual_seed(step), []
    for i in range(3):
        lengths = [3 + (step * 5 + i) % 7, 20 + (step + i) % 11]
        if step == 7 and i == 2:
            lengths.append(ROWS)
        tokens, targets = torch.randint(96, (2, sum(lengths)), generator=generator)
        targets[::4] = -1
        found.append(Batch(tokens, targets, Packed.of(lengths)))
    return found


class Steps:
    """A training at a level."""

    def __init__(self, made, dtype, level, cache, notes):
        self.decoder, self.numbers = made, []
        parameters = {name: p for name, p in made.named_parameters() if p.requires_grad}
        self.optimizer = AdamW(parameters, Config().optimizer, OPS)
        how = (CompileConfig.model_validate({"level": level}), ROWS, notes.append, cache)
        self.run = execution(made, Compute(OPS, dtype), parameters, self.optimizer, 0.01, *how)

    def step(self, number):
        one = self.run.gradient(batches(number), lambda: False)
        norm = self.run.norm(one.gradient)
        self.run.update(one.gradient, 1e-2, clip_scale(norm, 1.0))
        self.numbers += [one.loss, one.objective, norm]

    def state(self):
        """Losses and norms of every step, then all weights and moments."""
        numbers = torch.tensor(self.numbers, dtype=torch.float64)
        return [numbers, *self.decoder.parameters(), *self.optimizer.state_dict().values()]


def trained(made, dtype, level, cache, notes, steps=STEPS):
    run = Steps(made, dtype, level, cache, notes)
    for number in range(steps):
        run.step(number)
    return run.state()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_twenty_steps_at_every_level_give_the_same_bytes(family, dtype, programs):
    made, notes = decoder(family), []
    expected = trained(copy.deepcopy(made), dtype, "O0", programs, notes)
    for level in ("O1", "O2"):
        assert same(trained(copy.deepcopy(made), dtype, level, programs, notes), expected), level
    assert not notes, "every family is compiled"


def test_a_model_that_cannot_be_compiled_runs_operator_by_operator_and_says_so(programs):
    made, notes = decoder("llama"), []
    up = made.layers[1].mlp.up
    plain = type(up).forward

    class Looks(type(up)):
        def forward(self, ops, x):
            return plain(self, ops, x) * (1.0 if float(x.detach().abs().max()) >= 0 else 2.0)

    up.__class__ = Looks
    expected = trained(copy.deepcopy(made), torch.float32, "O0", programs, notes, steps=2)
    assert same(trained(copy.deepcopy(made), torch.float32, "O2", programs, notes, steps=2), expected)
    assert len(notes) == 1
    assert "O2 is not possible here" in notes[0]
    assert "block" in notes[0]


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_hook_is_called_although_it_came_late(level, programs):
    """A debugger's hook on a module or a weight: the run goes on operator by operator, with one line and the bytes."""
    made, notes, seen = decoder("llama"), [], []
    expected = trained(copy.deepcopy(made), torch.float32, "O0", programs, notes, steps=3)
    run = Steps(copy.deepcopy(made), torch.float32, level, programs, notes)
    run.step(0)
    assert not notes
    handle = run.decoder.layers[1].mlp.register_forward_hook(lambda *_: seen.append(True))
    run.step(1)
    assert seen
    handle.remove()
    run.step(2)
    assert same(run.state(), expected)
    assert len(notes) == 2
    assert "changed after it was compiled" in notes[0]
    assert notes[1].startswith(f"compile.level {level} is not possible here")
    assert "hooks" in notes[1]


def test_anomaly_detection_sees_operators(programs):
    notes = []
    with torch.autograd.set_detect_anomaly(True):
        trained(decoder("llama"), torch.float32, "auto", programs, notes, steps=1)
    assert "anomaly detection" in notes[0]


def test_adapters_are_trained_as_one_program_by_default(programs):
    made, notes = decoder("llama"), []
    add_lora(made.requires_grad_(False), 4, 8.0, ["q_proj", "down_proj"], 0)
    expected = trained(copy.deepcopy(made), torch.bfloat16, "O0", programs, notes, steps=3)
    assert same(trained(made, torch.bfloat16, "auto", programs, notes, steps=3), expected)
    assert not notes


def test_a_run_at_each_level_ends_with_the_same_weights(tiny, tmp_path):
    """With groups of micro-batches, whose number is part of the numerics."""
    found = []
    for level, groups in (("O0", 2), ("O1", 2), ("O2", 2), ("O0", 6)):
        train = {"eval_every": 3, "micro_batches": 6, "gradient_groups": groups}
        out = tmp_path / f"{level} {groups}"
        trainer = Trainer(tiny(out, compile={"level": level, "cache": False}, train=train))
        result = trainer.fit()
        found.append([torch.tensor(result.loss), *trainer.model.decoder.parameters()])
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert not same(found[0], found[3])
