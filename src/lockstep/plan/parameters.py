"""Parameters that one rank owns: of its stage, its tensor split, its experts, and after sharding over data ranks."""

from __future__ import annotations

import numpy as np

from lockstep.plan.columns import Column, Columns


def parameters(rows: Columns, vocabularies: Column | None = None) -> Column:
    """Parameters of the fullest stage on one rank, before sharding over data ranks, experts included.

    ``vocabularies``: how many of embedding and head the stage has (default: one, or both
    without a pipeline and in V placement).
    """
    return dense_parameters(rows, vocabularies) + expert_parameters(rows)


def dense_parameters(rows: Columns, vocabularies: Column | None = None) -> Column:
    """All of ``parameters`` but the experts: what every data rank has a copy of."""
    dense = rows.matrices * rows.hidden * rows.intermediate
    routed = rows.hidden * (rows.matrices * rows.shared_intermediate + rows.experts * rows.tp)
    body = rows.slow_layers * (rows.head_parameters + (1 - rows.moe) * dense + rows.moe * routed) / rows.tp
    body = body + rows.slow_layers * rows.latent_parameters
    both = (rows.pp == 1) | rows.folded  # the V placement puts the first and the last layers on one device
    ends = np.where(both, 2.0 - rows.tied, 1.0) if vocabularies is None else vocabularies
    return body + rows.hidden * (rows.vocab * ends + rows.positions * (ends > 0)) / rows.tp


def expert_parameters(rows: Columns) -> Column:
    """Experts of the fullest stage on one rank: split over ``ep`` and, in their width, over ``tp``."""
    one = rows.matrices * rows.hidden * rows.expert_intermediate / rows.tp
    return rows.slow_layers * rows.moe * rows.experts / rows.ep * one


def sharded_parameters(rows: Columns, level: int, vocabularies: Column | None = None) -> Column:
    """``parameters`` of a rank where ``fsdp`` at ``level`` or above splits them over its data ranks.

    Copies of an expert are ``ep`` times fewer than those of the other weights.
    """
    group = np.where(rows.fsdp >= level, rows.sharing, 1.0)
    copies = np.where(rows.fsdp >= level, np.maximum(1.0, rows.dp * rows.cp / rows.ep), 1.0)
    return dense_parameters(rows, vocabularies) / group + expert_parameters(rows) / copies
