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
    elif step.kind == "BW" and not rank.split:
        grows = _added(rank, done[chunk])
        each = (
            _exchange(rank, found, chunk, sums, growing * grows)
            if rank.copies
            else _grow(rank, found, chunk, sums, growing)
        )
    else:
        each = _backward(rank, found, chunk, sums) if step.kind != "W" else []
        if step.kind == "BW":  # B, then W: of embedding and head the sums have grown by then
            found = found | {"activations": found["activations"] - rank.full[chunk] + rank.late[chunk]}
            sums += rank.summed * rank.given[chunk] * _added(rank, done[chunk])
        if step.kind != "B":
            each += _weights(rank, found, chunk, sums, growing, _added(rank, done[chunk]))
    worst = max(each, key=lambda m: sum(m.values()))
    return worst | {"working": worst["working"] + rank.tail * opened}


def _added(rank: RankSizes, done: int) -> float:
    """How many sums more there are after a chunk's next micro-batch."""
    return rank.waiting[done + 1] - rank.waiting[done]


def _forward(rank: RankSizes, found: dict[str, float], chunk: int, opened: bool) -> list[dict[str, float]]:
    """The moments of F: a layer, and before them the embedding and after them the loss, for which weights that are
    sharded are gathered."""
    activations, group = found["activations"], rank.groups[chunk]
    moving = max(0.0, rank.passes[chunk].moving - rank.full[chunk])
    each = [found | {"activations": activations + moving, "working": min(rank.working, rank.light)}]
    if rank.gather:  # of the last layer, before it computes
        each.append(found | {"activations": activations - rank.passes[chunk].top, "working": rank.gather})
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
    last, waiting = rank.groups[chunk] == rank.ends, rank.waiting_ends(rank.groups[chunk])
    head = rank.words * (rank.given[chunk] and last)
    embedded = rank.words * (rank.groups[chunk] == 0 and not rank.waiting_ends(0))
    held = [
        (rank.full[chunk] + _beside(rank, chunk), _working(rank, one.begins_again)),
        (late + head, min(rank.working, rank.light)),
        (late + embedded, rank.calm),
    ]
    if rank.gather:
        held.append((rank.full[chunk], rank.gather + rank.calm / 2))
    if rank.copies:  # of experts whose products are not put off all gradients are there before the first is given away
        held.append((late + head + rank.experts * one.layers, rank.calm))
    for own, part, again in (*one.moments(rank.inputs), *one.last()):
        # The gradient of the head is there since the loss, that of the embedding comes last.
        put_off = part * (late - rank.words * waiting) + rank.words * last
        held.append((own + put_off, _working(rank, again)))
    each = [found | {"activations": left + own, "working": working} for own, working in held]
    if rank.given[chunk]:
        closed = rank.tail * (rank.groups[chunk] == rank.ends)
        end = {"activations": left + late, "gradients": sums + rank.copies * rank.words}
        each.append(found | end | {"working": rank.calm - closed})
    return each


def _weights(
    rank: RankSizes, found: dict[str, float], chunk: int, sums: float, growing: float, added: float
) -> list[dict[str, float]]:
    """The moments of W: what gradients are made of goes as they are made, product by product. growing: bytes of the
    chunk's gradients; added: how many sums more there are afterwards."""
    left, one = found["activations"] - rank.late[chunk], rank.passes[chunk]
    ends = rank.words * rank.waiting_ends(rank.groups[chunk])
    if not rank.copies:  # all are made before the first is given away
        moments = [(found["activations"], min(rank.largest, growing)), (left, growing)]
    else:
        layers = growing * added * (1 - rank.summed * rank.given[chunk] / rank.gradient[chunk])
        exchanged, before = rank.exchanged["W"], layers * (one.layers - 1) / one.layers
        all_made = rank.layer * one.layers
        moments = [
            (found["activations"], rank.largest),
            (found["activations"] - (rank.late[chunk] - ends) / one.layers, exchanged),
            (left + ends, max(layers, before + exchanged)),
        ]
        if rank.handed:  # between ranks of cp, too: then they are given away one by one
            beside = max(0.0, rank.copies - 1) * rank.layer
            moments = [(found["activations"], rank.largest), (left + ends, all_made + beside)]
        if ends:
            moments.append((left, growing * added + rank.copies * ends))
    return [found | {"activations": held, "gradients": sums + more, "working": 0.0} for held, more in moments]


def _grow(rank: RankSizes, found: dict[str, float], chunk: int, sums: float, growing: float) -> list[dict[str, float]]:
    """The moments of BW, in which the gradient grows while what the micro-batch held goes."""
    left = found["activations"] - rank.full[chunk]
    working = _working(rank, rank.passes[chunk].begins_again)
    grown = [found | {"activations": found["activations"] + _beside(rank, chunk), "working": working}]
    grown.append(found | {"activations": left, "gradients": sums + growing + rank.meet})
    for own, part, again in rank.passes[chunk].moments():
        now = {"activations": left + own, "gradients": sums + growing * part}
        grown.append(found | now | {"working": _working(rank, again)})
    return grown


def _exchange(
    rank: RankSizes, found: dict[str, float], chunk: int, sums: float, grows: float
) -> list[dict[str, float]]:
    """The moments of BW where gradients go as soon as a layer's are made, those of embedding and head, whole until
    then, at the end. grows: what the sums are more, or less, after this micro-batch."""
    last, elsewhere = rank.groups[chunk] == rank.ends, rank.tied and rank.ends > 0 and not rank.both
    first = rank.groups[chunk] == 0 and (not rank.tied or rank.both)
    one = rank.passes[chunk]
    layers = grows * (1 - rank.summed * (first + last) / rank.gradient[chunk])
    before = layers * (one.layers - 1) / one.layers
    left = found["activations"] - rank.full[chunk]
    ends = rank.words * (first + last + (rank.copies - 1) * (first or last))
    if elsewhere and rank.groups[chunk] == 0:  # rows of it are sent to the stage that owns it
        ends = rank.words
    at_end = sums + layers + max(ends, rank.words * last + rank.meet)
    top = found["activations"] - one.top
    layer = rank.exchanged["BW"]
    moments = [
        (left, sums + rank.words * last + layer + before, rank.calm),
        (left, at_end, rank.calm - rank.tail * last),
        (top, sums + layer, rank.calm),
        (found["activations"], sums, rank.gather and rank.gather + rank.calm / 2),
    ]
    for own, part, again in one.moments():
        # What an offloaded layer kept stays until all its gradients are made.
        made = rank.layer if one.away and not again else 0.0
        moments += [(left + own, sums + made + grows * part + rank.words * last, _working(rank, again))]
        # When a layer's gradients are exchanged, what it kept has gone.
        own -= 0.0 if again else one.each
        moments += [(left + own, sums + layer + grows * part + rank.words * last, rank.calm)]
    freed = [found | {"activations": held, "gradients": g, "working": w} for held, g, w in moments]
    return [found | {"working": _working(rank, one.begins_again)}, *freed]


def _beside(rank: RankSizes, chunk: int) -> float:
    """As the backward of a chunk begins: gradients of the last layer's MLP beside all that the layer keeps."""
    return 0.0 if rank.passes[chunk].begins_again else rank.beside


def _working(rank: RankSizes, again: bool) -> float:
    """Of a layer's backward, which is recomputed or not."""
    return rank.working if again else min(rank.working, rank.light)
