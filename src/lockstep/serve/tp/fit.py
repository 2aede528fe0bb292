"""How a model that several processes serve together is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.config.model import ModelConfig
from lockstep.ops import Numerics
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.partition import Partition
from lockstep.parallel.schedules import schedule
from lockstep.parallel.stages import stages_of
from lockstep.serve.tp.divide import fitted, in_segments
from lockstep.serve.tp.gathered import Gathered

if TYPE_CHECKING:
    from lockstep.model import Model, PackedCache

ServedPart = Partition | Gathered
"""A rank's part: in canonical segments whose products are summed, or by outputs that are gathered."""


def partition(config: ModelConfig, mesh: Mesh, numerics: Numerics) -> ServedPart:
    """What this rank of the mesh holds: its slices of every layer. Raises what `fitted` raises."""
    config = fitted(config, mesh.shape.tp, numerics)
    if not in_segments(config, mesh.shape.tp):
        return Gathered(config, mesh)
    table = schedule("1f1b", 1, 1)
    return Partition(config, mesh, table, stages_of(config.num_layers, table, config.tie_embeddings), shared_head=True)


def load_part(
    path: str, mesh: Mesh, dtype: str, numerics: Numerics, packed: PackedCache | None
) -> tuple[Model, ServedPart]:
    """This rank's part of a model on disk: it reads its own slices from the mapped files, or from the cache."""
    from lockstep.model import load

    parts: list[ServedPart] = []

    def cut(config: ModelConfig) -> ServedPart:
        parts.append(partition(config, mesh, numerics))
        return parts[-1]

    return load(path, dtype=dtype, numerics=numerics, packed=packed, part=cut), parts[0]
