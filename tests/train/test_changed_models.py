"""Models that a caller has changed: his own classes and functions, frozen parameters, hooks on everything. Each level
gives the bytes of O0 or says that it runs as O0."""

from __future__ import annotations

import copy
from types import MethodType

import pytest
import torch
from tests.compile.models import FAMILIES, decoder, same
from tests.train.test_levels import Steps
from torch.nn.modules import module as modules

from lockstep.compile import Cache
from lockstep.compile.cache import entries
from lockstep.compile.describe import describe
from lockstep.compile.own_code import OwnCode
from lockstep.errors import LockstepError
from lockstep.model.mlp import MLP

LEVELS = ("O1", "O2")


def scaled(factor):
    """An MLP's forward, times a factor."""
    plain = MLP.forward
    return lambda self, ops, *given: factor * plain(self, ops, *given)


def other_methods(made):
    for i in (0, 1):
        mlp = made.layers[i].mlp
        mlp.forward = MethodType(scaled(2.0 + i), mlp)


def other_class(factor):
    def change(made):
        made.layers[1].mlp.__class__ = type("Mine", (MLP,), {"forward": scaled(factor), "__module__": "mine"})

    return change


def frozen(*names):
    def change(made):
        for name in names:
            made.get_parameter(name).requires_grad_(False)

    return change


def runs(change, tmp_path, early=False, undo=lambda: None):
    """Three steps at each level, the model changed before the first or the second: what changed at O0, and for every
    other level whether the bytes are the same, and its lines."""
    found, expected, cache = {}, None, Cache(tmp_path)
    for level in ("O0", *LEVELS):
        made, notes = copy.deepcopy(decoder("llama", num_layers=2, tie_embeddings=False)), []
        if early:
            change(made)
        run = Steps(made, torch.float32, level, cache, notes)
        run.step(0)
        if not early:
            change(made)
        run.step(1)
        undo()
        expected = expected or run.state()
        found[level] = same(run.state(), expected), notes
    return found


@pytest.mark.parametrize("early", [True, False])
def test_functions_put_in_the_place_of_methods_are_told_apart(tmp_path, early):
    found = runs(other_methods, tmp_path, early)
    assert all(equal for equal, _ in found.values())


def test_classes_of_one_name_are_told_apart_and_not_kept_on_disk(tmp_path):
    for factor in (2.0, 7.0):
        assert all(equal for equal, _ in runs(other_class(factor), tmp_path, early=True).values())
    assert [stage for _, stage, _ in entries(tmp_path)].count("block") == 2, "ours, at O1 and O2"


def test_a_class_put_in_the_place_of_another_later_is_noticed(tmp_path):
    found = runs(other_class(3.0), tmp_path)
    assert all(equal for equal, _ in found.values())
    assert all("changed after it was compiled" in found[level][1][0] for level in LEVELS)


def test_a_function_put_into_our_class_is_noticed(tmp_path, monkeypatch):
    found = runs(lambda made: monkeypatch.setattr(MLP, "forward", scaled(3.0)), tmp_path, undo=monkeypatch.undo)
    assert all(equal for equal, _ in found.values())
    assert all("changed after it was compiled" in found[level][1][0] for level in LEVELS)


def test_a_decoder_that_computes_otherwise_runs_operator_by_operator(tmp_path):
    def change(made):
        plain = type(made).forward
        forward = lambda self, *given, **named: 2.0 * plain(self, *given, **named)  # noqa: E731
        made.__class__ = type("Twice", (type(made),), {"forward": forward, "__module__": "mine"})

    found = runs(change, tmp_path, early=True)
    for level in LEVELS:
        equal, notes = found[level]
        assert equal
        assert "Twice has code of its own" in notes[0]


@pytest.mark.parametrize("names", [["embed.weight"], ["output.weight"], ["norm.weight", "layers.0.mlp.up.weight"]])
def test_parameters_may_be_frozen_in_the_middle(tmp_path, names):
    assert all(equal for equal, _ in runs(frozen(*names), tmp_path).values())


def swapped(made):
    made.layers[0], made.layers[1] = made.layers[1], made.layers[0]


def shared(made):
    made.layers[1] = made.layers[0]


def dropped(made):
    del made.layers[1]


@pytest.mark.parametrize("change", [swapped, shared, dropped])
def test_layers_that_change_places_keep_their_gradients(tmp_path, change):
    found = runs(change, tmp_path)
    assert all(equal for equal, _ in found.values())
    assert "is not the parameter any more that the run trains" in found["O2"][1][-1]


def test_a_weight_that_is_not_contiguous_is_named(tmp_path):
    """O0 computes with it; what cannot be is its update."""

    def turned(made):
        weight = made.layers[1].mlp.up.weight
        weight.data = weight.data.T.contiguous().T

    for level in ("O0", *LEVELS):
        made, notes = decoder("llama", num_layers=2), []
        run = Steps(made, torch.float32, level, Cache(tmp_path), notes)
        run.step(0)
        turned(made)
        with pytest.raises(LockstepError, match=r"layers.1.mlp.up.weight is not contiguous, .* strides"):
            run.step(1)
        assert level == "O0" or "mlp.up.weight is not contiguous, " in notes[-1]


def test_a_parameter_that_the_run_does_not_train_may_not_ask_for_a_gradient(tmp_path):
    made, notes = decoder("llama"), []
    made.layers[1].mlp.up.weight.requires_grad_(False)
    run = Steps(made, torch.float32, "O2", Cache(tmp_path), notes)
    run.step(0)
    made.layers[1].mlp.up.weight.requires_grad_(True)
    run.step(1)
    assert "layers.1.mlp.up.weight asks for a gradient, and the run does not train it" in notes[1]


def test_an_error_that_says_nothing_is_told_by_its_class(tmp_path):
    def forward(self, ops, *given):
        raise AssertionError

    made, notes = decoder("llama"), []
    made.layers[0].mlp.__class__ = type("Mine", (MLP,), {"forward": forward, "__module__": "mine"})
    Steps(made, torch.float32, "O2", Cache(tmp_path), notes)
    assert notes[0].endswith("block: AssertionError")


@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_on_all_modules_is_called(level, tmp_path):
    seen, notes = [], []
    run = Steps(decoder("llama"), torch.float32, level, Cache(tmp_path), notes)
    run.step(0)
    handle = modules.register_module_forward_hook(lambda part, *_: seen.append(type(part)))
    try:
        run.step(1)
    finally:
        handle.remove()
    assert MLP in seen
    assert "hooks" in notes[-1]


@pytest.mark.parametrize("family", FAMILIES)
def test_our_own_models_hold_no_code_but_ours(family):
    """Otherwise nothing of them would be kept on disk, and no two layers were one kind."""

    def holds(value):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
        return isinstance(value, OwnCode) or any(map(holds, inner))

    assert not holds(describe(decoder(family)))
