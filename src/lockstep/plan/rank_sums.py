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
        # A tied embedding's waits for its rows.
        unsent = (
            rank.words * (rank.sent[chunk] - rank.waiting[-1]) * (rank.takes_rows and rank.groups[chunk] == rank.ends)
        )
        waits = any(done[c] < rank.table.micro_batches for c in range(len(done))) and last < rank.bucket
        # Those of other ranks' micro-batches are added up by then.
        return rank.gradient[chunk] * rank.sent[chunk] - waits * last * (rank.sent[chunk] - rank.nodes) - unsent
    return (rank.gradient[chunk] + rank.others[chunk]) * rank.waiting[done[chunk]]


def halves(rank: RankSizes) -> Iterator[tuple[float, float]]:
    """For every step, bytes of a tied embedding's gradients that wait, as it begins and as it ends, for those of its
    other use (in V placement of the same rank, otherwise rows from the first stage, which are taken then), or these for
    them; less what its sum is then behind the others."""
    own, came = set[int](), set[int]()
    for position, step in enumerate(rank.table.rows[rank.stage]):
        before = _halves(rank, own, came)
        for part in step.parts:
            if part.kind in ("W", "BW") and rank.groups[part.chunk] == rank.ends:
                own.add(part.micro_batch)
            if part.kind in ("W", "BW") and rank.groups[part.chunk] == 0:
                came.add(part.micro_batch)
        yield before, _halves(rank, own, came)
        came.update(rank.rows_after.get(position, []))


def _halves(rank: RankSizes, own: set[int], came: set[int]) -> float:
    behind = rank.waiting[len(own)] - rank.waiting[len(own & came)]
    return rank.words * len(own ^ came) - rank.summed * behind if rank.takes_rows or rank.both else 0.0


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
    buckets = rank.buckets[chunk]
    if rank.takes_rows and rank.groups[chunk] == rank.ends:
        buckets = buckets[:-1]
    gradients = sum(waits(rank, c, after) for c in range(len(after))) + _other_nodes(rank, chunk, buckets)
    freed = rank.full[chunk] if step.kind == "BW" else rank.late[chunk]
    return found | {"gradients": gradients, "activations": found["activations"] - freed, "working": 0.0}


def rows_at_the_end(rank: RankSizes) -> Iterator[float]:
    """After the last step of the last stage, bytes of gradients while rows of a tied embedding that have not been taken
    are made as large as it is and added: as the first are taken, and as the sum is sent off."""
    count = rank.table.micro_batches
    late = count - sum(map(len, rank.rows_after.values()))
    if not rank.takes_rows or not late:
        return
    done = [count] * len(rank.groups)
    own = set(range(count))
    came = set(range(count - late))
    sums = sum(waits(rank, c, done) for c in range(len(done)))
    yield sums + _halves(rank, own, came) + rank.words * max(1.0, rank.copies)
    if rank.sent:
        chunk = rank.groups.index(rank.ends)
        whole = sum(one * times for one, times in zip(rank.gradient, rank.sent, strict=True))
        yield whole + (rank.nodes - 1) * rank.buckets[chunk][-1]


def _other_nodes(rank: RankSizes, chunk: int, buckets: list[float]) -> float:
    """Bytes of the nodes of a bucket that is being sent, but the first of them, which becomes the result; less what
    buckets that come after it will take more when they are sent."""
    most, later = 0.0, 0.0
    for bucket in reversed(buckets):
        most = max(most, (rank.nodes - 1) * bucket - (rank.sent[chunk] - rank.nodes) * later)
        later += bucket
    return most
