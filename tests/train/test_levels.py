"""Twenty steps at O0, O1 and O2: the same losses, norms, weights and moments, byte for byte, for every family."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.compile.models import DTYPES, FAMILIES, decoder, same

from lockstep.compile import Cache
from lockstep.config import CompileConfig, Config
from lockstep.ops import Packed, operators
from lockstep.train.data import Batch
from lockstep.train.execution import execution
from lockstep.train.optimizer import AdamW, clip_scale
from lockstep.train.step import Compute
from lockstep.train.trainer import Trainer

OPS = operators("bitwise")
STEPS, ROWS = 20, 48


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """One compile cache for all: levels share the blocks."""
    return Cache(tmp_path_factory.mktemp("programs"))


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


def trained(made, dtype, level, cache, notes, steps=STEPS):
    """Losses and norms of every step, then all weights and moments."""
    parameters = {name: p for name, p in made.named_parameters() if p.requires_grad}
    optimizer = AdamW(parameters, Config().optimizer, OPS)
    config = CompileConfig.model_validate({"level": level})
    run = execution(made, Compute(OPS, dtype), parameters, optimizer, 0.01, config, ROWS, notes.append, cache)
    found = []
    for step in range(steps):
        one = run.gradient(batches(step), lambda: False)
        norm = run.norm(one.gradient)
        run.update(one.gradient, 1e-2, clip_scale(norm, 1.0))
        found += [one.loss, one.objective, norm]
    return [torch.tensor(found, dtype=torch.float64), *made.parameters(), *optimizer.state_dict().values()]


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


def test_a_run_at_each_level_ends_with_the_same_weights(tiny, tmp_path):
    found = []
    for level in ("O0", "O1", "O2"):
        trainer = Trainer(tiny(tmp_path / level, compile={"level": level, "cache": False}, train={"eval_every": 3}))
        result = trainer.fit()
        found.append([torch.tensor(result.loss), *trainer.model.decoder.parameters()])
    assert same(found[0], found[1])
    assert same(found[0], found[2])
