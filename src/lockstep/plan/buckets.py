"""Buckets of the gradient reduction: what of their messages nothing hides, and the sizes that a search tries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lockstep.plan.columns import Column, Columns
from lockstep.plan.layout import Layout
from lockstep.plan.parameters import parameters

SIZES_MB = (1, 5, 25, 100, 400)


def in_buckets(layouts: Sequence[Layout]) -> list[Layout]:
    """The layouts that reduce gradients at the end of a step, with every size of bucket; the others as they are."""
    return [
        replace(layout, bucket_mb=size)
        for layout in layouts
        for size in (SIZES_MB if layout.dp > 1 and layout.fsdp < 2 else (layout.bucket_mb,))
    ]


def exposed_in_buckets(rows: Columns, whole: Column, latency: Column, work: Column) -> Column:
    """Seconds of the reduction that stand after ``work``, the backward pass beside which its buckets travel.

    whole: seconds of all gradients in one message. latency: seconds of a message without bytes, which every further
    bucket costs. The last bucket has the first layers, whose gradients come when the work is over: nothing hides it.
    """
    count = np.maximum(1.0, np.ceil(4 * parameters(rows) / (rows.bucket_mb * 2.0**20)))
    total = whole + (count - 1) * latency
    return np.maximum(total - work, total / count)
