"""A run that names no level: what is cached from the first step on, otherwise compiled after it where that pays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.compile.models import same

from lockstep.compile import Cache, compiler
from lockstep.config import Config
from lockstep.errors import LockstepError
from lockstep.train import Trainer, compiled, speed, when_to_compile
from lockstep.train.execution import Eager, Whole

Tiny = Callable[..., Config]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(speed, "matrix_peak", lambda dtype: 1e11)
    monkeypatch.setattr(compiled, "Cache", functools.partial(Cache, tmp_path / "programs"))


def run(config: Config, notes: list[str]) -> tuple[list[type], list[torch.Tensor]]:
    """How each step was run, and the weights after all."""
    trainer = Trainer(config)
    trainer.run.engine.execution._note = notes.append
    engine, kinds = trainer.run.engine, []
    plain = type(engine).update

    def update(*arguments: object) -> None:
        kinds.append(type(engine.execution.now))
        plain(engine, *arguments)

    engine.update = update
    trainer.fit()
    return kinds, [p.detach().clone() for p in trainer.model.decoder.parameters()]


def test_the_first_step_waits_for_nothing_and_the_next_run_has_it_all(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    config = functools.partial(tiny, train={"steps": 3})
    kinds, expected = run(config(tmp_path / "short"), notes)
    assert kinds == [Eager] * 3
    assert notes[0].startswith("operators run one by one (O0): 2 steps of ")
    monkeypatch.setattr(when_to_compile, "COST", 0.0)
    kinds, weights = run(config(tmp_path / "long"), notes)
    assert kinds == [Eager, Whole, Whole]
    assert same(weights, expected)
    assert notes[1].startswith("compiled in ")
    monkeypatch.setattr(compiler, "capture", lambda *_: pytest.fail("everything is in the cache"))
    kinds, weights = run(config(tmp_path / "again"), notes)
    assert kinds == [Whole] * 3
    assert same(weights, expected)
    assert len(notes) == 2


@pytest.mark.parametrize(("level", "kind"), [("O0", Eager), ("O2", Whole)])
def test_a_level_that_is_named_is_what_runs(tiny: Tiny, level: str, kind: type) -> None:
    notes: list[str] = []
    assert run(tiny(train={"steps": 2}, compile={"level": level}), notes)[0] == [kind] * 2
    assert not notes


@pytest.mark.parametrize("passes", [{"disable_pass": ["dead-code"]}, {"only_pass": ["dead-code"]}])
def test_passes_that_are_named_run_however_short_the_run(tiny: Tiny, passes: dict[str, list[str]]) -> None:
    assert run(tiny(train={"steps": 2}, compile=passes), notes := [])[0] == [Whole] * 2
    assert not notes


def test_a_pass_that_numerics_fast_cannot_run_is_refused(tiny: Tiny) -> None:
    config = tiny(train={"steps": 2, "numerics": "fast"}, compile={"only_pass": ["dead-code"]})
    with pytest.raises(LockstepError, match=r"dead-code does not run under train.numerics fast.*compile.only_pass out"):
        Trainer(config)


def test_level_o0_says_that_there_is_nothing_to_explain(tiny: Tiny, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tiny(train={"steps": 2}, compile={"level": "O0", "explain": True}), [])[0] == [Eager] * 2
    assert capsys.readouterr().err.count("compile.explain: compile.level is O0, so operators run one by one") == 1


def test_compiling_pays_for_many_or_long_steps() -> None:
    assert when_to_compile.pays(300, 0.35)
    assert when_to_compile.pays(10, 17.0)
    assert not when_to_compile.pays(2, 10.0)
    assert not when_to_compile.pays(100, 0.01)
    assert not when_to_compile.pays(0, 1e9)
