"""One served model on several processes (tensor parallel): the same bytes as on one (contract C4).

divide: which models can be cut. fit: how. gathered: those whose results are gathered, not summed. orders: what the
first rank tells the others, over their mesh. group: the first rank's side. rank: the other ranks' process. processes:
what starts and watches those. messages: how they are set up.

The engine (scheduler, cache, sampler) is in the first rank alone. Every pass is told to the others, which hold pages
with the same numbers for the heads that are theirs, and join in its sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.serve.launch import Launched

if TYPE_CHECKING:
    from lockstep.model import Model, PackedCache
    from lockstep.ops import Numerics
    from lockstep.serve.tp.group import Group


def open_model(
    path: str,
    tp: int,
    dtype: str = "bfloat16",
    numerics: Numerics = "bitwise",
    ranks: Sequence[Launched] = (),
    packed: PackedCache | None = None,
) -> Model | Group:
    """What an `Engine` takes: a model, or with tp > 1 the processes that share one, each with its slices alone.

    ranks: what `launch_ranks` gave, where it was called before there was time for this. packed: see `load`.
    """
    if tp == 1:  # what a single process never needs is not imported
        from lockstep.model import load

        return load(path, dtype=dtype, numerics=numerics, packed=packed)
    from lockstep.serve.tp.group import Group

    return Group.load(path, tp, dtype, numerics, ranks, packed)
