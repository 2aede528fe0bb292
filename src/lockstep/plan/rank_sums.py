"""Sums of gradients that wait on a rank, step by step, and those that are on their way to other replicas."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.parallel.schedules import Step
from lockstep.plan.rank_sizes import RankSizes


def waits(rank: RankSizes, chunk: int, done: list[int]) -> float:
    """Bytes of a chunk's sums of gradients. When it has all of them, and those of the layers behind, they are on their
    way to the other replicas; but not a bucket that still takes some of the chunk before."""
    behind = (c for c in range(len(done)) if rank.groups[c] >= rank.groups[chunk])
    if rank.sent and all(done[c] == rank.table.micro_batches for c in behind):
        last = rank.buckets[chunk][-1]
        waits = any(done[c] < rank.table.micro_batches for c in range(len(done))) and last < rank.bucket
        # Those of other ranks' micro-batches are added up by then.
        return rank.gradient[chunk] * rank.sent[chunk] - waits * last * (rank.sent[chunk] - rank.nodes)
    return (rank.gradient[chunk] + rank.others[chunk]) * rank.waiting[done[chunk]]


def halves(rank: RankSizes) -> Iterator[float]:
    """For every step, bytes of a tied embedding's gradients that wait, as it begins, for those of its other use (in
    V placement of the same rank, otherwise rows from the first stage), or these for them; less what its sum is then
    behind the others."""
    own, came = set[int](), set[int]()
    for position, step in enumerate(rank.table.rows[rank.stage]):
        behind = rank.waiting[len(own)] - rank.waiting[len(own & came)]
        yield rank.words * len(own ^ came) - rank.summed * behind if rank.rows_after or rank.both else 0.0
        for part in step.parts:
            if part.kind in ("W", "BW") and rank.groups[part.chunk] == rank.ends:
                own.add(part.micro_batch)
            if part.kind in ("W", "BW") and rank.groups[part.chunk] == 0:
                came.add(part.micro_batch)
        came.update(rank.rows_after.get(position, []))


def ahead(rank: RankSizes) -> Iterator[float]:
    """For every step, bytes that sums of embedding and head, which B gave away, are ahead of those of layers."""
    backs, done = [0] * len(rank.groups), [0] * len(rank.groups)
    for step in rank.table.rows[rank.stage]:
        more = [rank.waiting[b] - rank.waiting[w] for b, w in zip(backs, done, strict=True)]
        yield rank.summed * sum(n for n, given in zip(more, rank.given, strict=True) if given)
        for part in step.parts:
            backs[part.chunk] += part.kind in ("B", "BW")
            done[part.chunk] += part.kind in ("W", "BW")


def experts_grow(rank: RankSizes, chunk: int, done: int) -> float:
    """Of experts that are held for other ranks too: how much more than one sum a micro-batch's gradients add. They
    come layer by layer, and every other time they are added into what waits."""
    others = rank.others[chunk]
    return -others / max(rank.ranks - 1, 1) if done % 2 else others


def sent_off(rank: RankSizes, found: dict[str, float], step: Step, done: list[int]) -> dict[str, float]:
    """The end of a chunk's last step: its gradients are sent off, what they were made of has gone."""
    chunk = step.chunk
    after = [n + (c == chunk) for c, n in enumerate(done)]
    gradients = sum(waits(rank, c, after) for c in range(len(after))) + _other_nodes(rank, chunk)
    freed = rank.full[chunk] if step.kind == "BW" else rank.late[chunk]
    return found | {"gradients": gradients, "activations": found["activations"] - freed, "working": 0.0}


def _other_nodes(rank: RankSizes, chunk: int) -> float:
    """Bytes of the nodes of a bucket that is being sent, but the first of them, which becomes the result; less what
    buckets that come after it will take more when they are sent."""
    most, later = 0.0, 0.0
    for bucket in reversed(rank.buckets[chunk]):
        most = max(most, (rank.nodes - 1) * bucket - (rank.sent[chunk] - rank.nodes) * later)
        later += bucket
    return most
