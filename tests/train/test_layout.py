"""What the processor's device class says about a layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.train.tiny_run import MODEL, tiny_tree

from lockstep.config import Config, ModelConfig
from lockstep.config.check import check
from lockstep.errors import NotRunError
from lockstep.ops.device_class import BF16_CLASS
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.transport import NoTransport
from lockstep.train import layout


class _First(NoTransport):
    """Of two ranks, one that sends nothing."""

    rank, size = 0, 2


def test_rows_are_not_shared_where_gradients_go_by_pairs_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = check(ModelConfig, {**MODEL, "num_kv_heads": 2}, "test")
    mesh = Mesh(MeshShape(cp=2), _First())

    def asked(dtype: str) -> None:
        tree = tiny_tree(Path("text"), Path("out"), parallel={"cp": 2}, train={"dtype": dtype})
        layout.partition(check(Config, tree, "test"), shape, mesh)

    for name, refused in ((BF16_CLASS, True), ("cpu-fma", False)):
        monkeypatch.setattr(layout, "device_class", lambda name=name: name)
        asked("float32")
        if refused:
            with pytest.raises(NotRunError, match=r"parallel.cp is 2.*pairs of rows.*ATEN_CPU_CAPABILITY=avx2"):
                asked("bfloat16")
        else:
            asked("bfloat16")
