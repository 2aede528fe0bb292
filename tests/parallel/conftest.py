"""One thread of computation in each rank, as ranks are threads here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.ranks_as_threads import on_threads

from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape


@pytest.fixture
def threads() -> Iterator[Callable[[MeshShape, Callable[[Mesh], Any]], list[Any]]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield on_threads
    torch.set_num_threads(before)
