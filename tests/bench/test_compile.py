"""The compile bench: what is run, what is compared, what is told. The sides themselves are stood in for but in one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.bench.compiling import measure
from lockstep.bench.compiling.side import levels, shape
from lockstep.bench.turns import Spread
from lockstep.cli import app
from lockstep.errors import LockstepError


@pytest.fixture
def sides(monkeypatch):
    """Every side's compilation takes a second a layer, a hundredth from the cache; what was called is kept."""
    called: list[tuple[str, int]] = []

    def ways(name, where):
        def way(depth, cache):
            before = len(list(Path(cache).iterdir()))  # processes that had this cache
            (Path(cache) / str(before)).touch()
            called.append((name, depth))
            return {"compile": depth / (1, 20, 200, 100)[before], "step": 0.5, "loss": 7.0}

        return way

    one = Spread(0.25, 0.2, 0.3)
    monkeypatch.setattr(measure, "_ways", ways)
    monkeypatch.setattr(measure, "_steps", lambda depth, rounds: dict.fromkeys(measure.LEVELS, one))
    monkeypatch.setattr(measure, "_chain", lambda rounds: {"eager": 2e-4, "sunk": 1e-4})
    monkeypatch.setattr(measure, "_block", lambda rounds: {"O0": 1e-3, "plain": 1.1e-3, "ratio": 1.1})
    return called


def report(depths, peers):
    return measure.compile_report(depths, peers, 1, lambda line: None, "lockstep bench compile", Path("/nowhere"))


def test_every_side_is_compiled_cold_and_then_from_its_cache(sides):
    found = report([4, 48, 96], ["torch"])
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["compile O0, s"] == ("4.00", "48.00", "96.00")
    assert rows["compile O2, s"] == ("4.00 / 0.04", "48.00 / 0.48", "96.00 / 0.96")
    assert rows["compile torch.compile, s"] == rows["compile O2, s"]
    assert rows["step O2, ms"] == ("250.0 (1.00x)",) * 3
    assert rows["step torch.compile, ms"] == ("500.0",) * 3
    assert rows["block O0, ms"] == ("1.000 (1.10x)", "", "")
    assert any("O1 24.00x, O2 24.00x" in note for note in found.notes)
    assert any("O2 100x, 100x, 100x" in note for note in found.notes)
    assert sides.count(("O0", 4)) == 1
    assert sides.count(("O2", 4)) == 4


def test_a_peer_is_not_waited_for_without_end(sides):
    found = report([4, 96, 200], ["torch"])
    rows = {row[0]: row[1:] for row in found.rows}
    assert rows["compile torch.compile, s"] == ("4.00 / 0.04", "96.00 / 0.96", "-")
    assert any("torch.compile was not run with 200 layers" in note for note in found.notes)
    assert ("O2", 200) in sides, "our own levels are"


def test_a_peer_that_does_other_work_is_refused():
    measure._check_losses({4: [{"loss": 7.0}]}, {4: [{"loss": 7.001}]})
    for loss in (7.1, float("nan")):
        with pytest.raises(LockstepError, match="not the same work"):
            measure._check_losses({4: [{"loss": 7.0}]}, {4: [{"loss": loss}]})


def test_a_block_in_plain_pytorch_around_the_same_operators_gives_the_same_bits(monkeypatch):
    monkeypatch.setattr(measure, "_PASSES", 1)
    assert measure._block(1).keys() == {"O0", "plain", "ratio"}


def test_a_side_gives_the_same_losses_eagerly_and_compiled(tmp_path):
    import torch

    found = []
    for level in ("O0", "O2"):
        side = levels(shape(1), level, tmp_path, torch.float32)
        found.append([side.eager(), *(step() for step in [side.compiled()] * 2)])
    assert found[0] == found[1]


def test_unknown_and_missing_peers_are_told(capsys, tmp_path):
    assert app.run(["bench", "compile", "--vs", "jax"]) == 2
    assert "known are torch and mindspore" in capsys.readouterr().err
    assert app.run(["bench", "compile", "--vs", "mindspore", "--peers", str(tmp_path)]) == 2
    assert "peers.sh mindspore" in capsys.readouterr().err
