"""The worst moment of a step: of a forward, a backward, its half, or one in which gradients go as they are made."""

from __future__ import annotations

from lockstep.parallel.schedules import Step
from lockstep.plan.rank_sizes import RankSizes


def worst_moment(
    rank: RankSizes, found: dict[str, float], step: Step, done: list[int], sums: float, growing: float, opened: bool
) -> dict[str, float]:
    """The worst moment of a step, but for what is sent off at its end. opened: the head is gathered already."""
    chunk = step.chunk
    if step.kind == "F":
        each = _forward(rank, found, chunk, opened)
    elif step.kind == "B":
        each = _backward(rank, found, chunk, sums)
    elif rank.copies:
        grows = growing * (rank.waiting[done[chunk] + 1] - rank.waiting[done[chunk]])
        each = _exchange(rank, found, chunk, sums, grows, step.kind == "BW")
    else:
        each = _grow(rank, found, chunk, sums, growing, step.kind == "BW")
    worst = max(each, key=lambda m: sum(m.values()))
    return worst | {"working": worst["working"] + rank.tail * opened}


def _forward(rank: RankSizes, found: dict[str, float], chunk: int, opened: bool) -> list[dict[str, float]]:
    """The moments of F: a layer, and before them the embedding and after them the loss, for which weights that are
    sharded are gathered."""
    activations, group = found["activations"], rank.groups[chunk]
    moving = max(0.0, rank.passes[chunk].moving - rank.full[chunk])
    each = [found | {"activations": activations + moving, "working": min(rank.working, rank.light)}]
    if group == 0 and not (rank.tied and not rank.both and rank.ends):
        each.append(found | {"activations": activations - rank.full[chunk], "working": rank.gathered})
    if group == rank.ends:
        here = 0.0 if opened else rank.tail
        each.append(found | {"loss": rank.loss, "working": here if rank.tail else each[0]["working"]})
        each.append(found | {"working": 0.0 if opened else rank.gathered})
    return each


def _backward(rank: RankSizes, found: dict[str, float], chunk: int, sums: float) -> list[dict[str, float]]:
    """The moments of B, at whose end the gradients of embedding or head may be given away."""
    left = found["activations"] - rank.full[chunk]
    one, late = rank.passes[chunk], rank.late[chunk]
    head = rank.words * (rank.given[chunk] and rank.groups[chunk] == rank.ends)
    embedded = rank.words * (rank.groups[chunk] == 0 and not rank.waiting_ends(0))
    # The output gradients of the last layer's MLP are kept for W while its activations are still there.
    first = rank.full[chunk] + rank.beside, _working(rank, one.begins_again)
    held = [first, (late + head, min(rank.working, rank.light)), (late + embedded, rank.calm)]
    for own, part, again in (*one.moments(), *one.last()):
        held.append((own + part * late + head, _working(rank, again) + rank.put_off * again))
    each = [found | {"activations": left + own, "working": working} for own, working in held]
    if rank.given[chunk]:
        closed = rank.tail * (rank.groups[chunk] == rank.ends)
        end = {"activations": left + late, "gradients": sums + rank.copies * rank.words}
        each.append(found | end | {"working": rank.calm - closed})
    return each


def _grow(
    rank: RankSizes, found: dict[str, float], chunk: int, sums: float, growing: float, whole: bool
) -> list[dict[str, float]]:
    """The moments in which the gradient grows while what the micro-batch held goes (BW), or beside it (W)."""
    if not whole:
        # All are handed on between ranks of cp before the first is given away, and come back as new ones.
        sums = sums + rank.handed * rank.gradient[chunk]
        before = rank.words * rank.waiting_ends(rank.groups[chunk])
        return [found | {"gradients": sums + max(0.0, growing - before), "working": 0.0}]
    left = found["activations"] - rank.full[chunk]
    twice = rank.words if rank.tied and rank.ends == 0 else 0.0  # the embedding's two gradients before their sum
    grown = [found | {"working": _working(rank, rank.passes[chunk].begins_again)}]
    grown.append(found | {"activations": left, "gradients": sums + growing + twice})
    for own, part, again in rank.passes[chunk].moments():
        now = {"activations": left + own, "gradients": sums + growing * part}
        grown.append(found | now | {"working": _working(rank, again)})
    return grown


def _exchange(
    rank: RankSizes, found: dict[str, float], chunk: int, sums: float, grows: float, whole: bool
) -> list[dict[str, float]]:
    """The moments in which gradients go as soon as a layer's are made; of BW those of embedding and head, whole
    until then, at the end. grows: what the sums are more, or less, after this micro-batch."""
    first, last = rank.groups[chunk] == 0, rank.groups[chunk] == rank.ends
    one = rank.passes[chunk]
    before = grows * (one.layers - 1) / one.layers
    if not whole:
        layers = grows * (1 - rank.summed * rank.given[chunk] / rank.gradient[chunk])
        exchanged = rank.exchanged["W"]
        if rank.handed:  # between ranks of cp all are handed on, and are there until the last is given away
            all_layers = rank.layer * one.layers
            sums, exchanged = sums + all_layers, max((rank.handed - 1) * all_layers, (rank.copies - 1) * rank.layer)
        most = max(layers, layers * (one.layers - 1) / one.layers + exchanged)
        each = [found | {"gradients": sums + most, "working": 0.0}]
        if waits := rank.words * rank.waiting_ends(rank.groups[chunk]):
            end = {"activations": found["activations"] - rank.late[chunk], "working": 0.0}
            each.append(found | end | {"gradients": sums + grows + rank.copies * waits})
        return each
    ends = max(first, last) if rank.tied else first + last
    left = found["activations"] - rank.full[chunk]
    at_end = sums + grows + rank.words * (ends + (rank.copies - 1) * (ends > 0))
    top = found["activations"] - one.top
    layer = rank.exchanged["BW"]
    moments = [
        (left, sums + rank.words * last + layer + before, rank.calm),
        (left, at_end, rank.calm - rank.tail * last),
        (top, sums + layer, rank.calm),
    ]
    for own, part, again in one.moments():
        moments += [(left + own, sums + grows * part + rank.words * last, _working(rank, again))]
        moments += [(left + own, sums + layer + grows * part + rank.words * last, rank.calm)]
    freed = [found | {"activations": held, "gradients": g, "working": w} for held, g, w in moments]
    return [found | {"working": _working(rank, one.begins_again)}, *freed]


def _working(rank: RankSizes, again: bool) -> float:
    """Of a layer's backward, which is recomputed or not."""
    return rank.working if again else min(rank.working, rank.light)
