"""What the processor's device class says about a layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.train.tiny_run import MODEL, tiny_tree

from lockstep.config import Config, ModelConfig
from lockstep.config.check import check
from lockstep.ops import linear
from lockstep.ops.device_class import AMX_CLASS, BF16_CLASS
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.transport import NoTransport
from lockstep.train import layout


class _First(NoTransport):
    """Of two ranks, one that sends nothing."""

    rank, size = 0, 2


def test_rows_are_shared_as_a_gradient_takes_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = check(ModelConfig, {**MODEL, "num_kv_heads": 2}, "test")
    mesh = Mesh(MeshShape(cp=2), _First())
    for name, dtype, step in (
        (AMX_CLASS, "bfloat16", 32), (BF16_CLASS, "bfloat16", 2), (BF16_CLASS, "float32", 1), ("cpu-fma", "bfloat16", 1)
    ):  # fmt: skip
        monkeypatch.setattr(linear, "device_class", lambda name=name: name)
        tree = tiny_tree(Path("text"), Path("out"), parallel={"cp": 2}, train={"dtype": dtype})
        part = layout.partition(check(Config, tree, "test"), shape, mesh)
        assert part is not None
        assert part.rows is not None
        assert (part.row_unit, part.rows.share(167)) == (2 * step, 96 if step == 32 else 84)
        assert part.rows.share(5) == {1: 3, 2: 2, 32: 0}[step]
