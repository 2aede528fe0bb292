"""The worst moment of a step: of a forward, a backward, its half, or one in which gradients go as they are made."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.parallel.schedules import Step
from lockstep.plan.chunk_pass import Moment
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
    working = rank.forward + rank.light - rank.calm
    each = [found | {"activations": activations + moving, "working": working}]
    if rank.gather:  # of the last layer, before it computes
        each.append(found | {"activations": activations - rank.passes[chunk].top, "working": rank.gather})
    if group == 0 and not (rank.tied and not rank.both and rank.ends):
        each.append(found | {"activations": activations - rank.full[chunk], "working": rank.gathered})
    if group == rank.ends:
        here = 0.0 if opened else rank.tail
        there = found | {"activations": activations + rank.passes[chunk].leaving}
        each.append(there | {"loss": rank.loss, "working": here + rank.head_input})
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
        *_begun(rank, chunk),
        (late + head, _light(rank)),
        (late + embedded, rank.calm),
    ]
    if rank.copies:  # of experts whose products are not put off all gradients are there before the first is given away
        held.append((late + head + rank.experts * one.layers, rank.calm))
    each = (late - rank.words * waiting) / one.layers
    for moment in one.moments():
        # The gradient of the head is there since the loss, that of the embedding comes last.
        held += [(n + moment.done * each + rank.words * last, working) for n, working in _in_layer(rank, chunk, moment)]
    moments = [found | {"activations": left + own, "working": working} for own, working in held]
    if rank.given[chunk]:
        closed = rank.tail * (rank.groups[chunk] == rank.ends)
        end = {"activations": left + late, "gradients": sums + rank.copies * rank.words}
        moments.append(found | end | {"working": rank.calm - closed})
    return moments


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
            beside = max(0.0, exchanged - rank.layer)
            moments = [(found["activations"], rank.largest), (left + ends, all_made + beside)]
        if ends:
            moments.append((left, growing * added + rank.copies * ends))
    return [found | {"activations": held, "gradients": sums + more, "working": 0.0} for held, more in moments]


def _grow(rank: RankSizes, found: dict[str, float], chunk: int, sums: float, growing: float) -> list[dict[str, float]]:
    """The moments of BW, in which the gradient grows while what the micro-batch held goes. That of the head is there
    since the loss."""
    left, one = found["activations"] - rank.full[chunk], rank.passes[chunk]
    head = rank.words * (growing > 0 and rank.groups[chunk] == rank.ends)
    layers = max(0.0, growing - rank.words * rank.owned_ends(rank.groups[chunk]))
    grown = [found | {"activations": left + held, "working": working} for held, working in _begun(rank, chunk)]
    # Of an embedding that another stage owns the whole gradient is made, before its rows are sent.
    elsewhere = rank.words * (growing > 0 and rank.groups[chunk] == 0 and not rank.owned_ends(0))
    end = {"activations": left, "gradients": sums + growing + rank.meet + elsewhere}
    grown.append(found | end | {"working": min(rank.working, rank.calm)})
    for moment in one.moments():
        made = sums + head + layers * moment.done / one.layers
        for held, working in _in_layer(rank, chunk, moment):
            grown.append(found | {"activations": left + held, "gradients": made, "working": working})
        if moment.treated == "away" and not rank.handed:  # all that the layer kept is there yet
            made += layers / one.layers
            grown.append(found | {"activations": left + moment.held, "gradients": made, "working": rank.closing})
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
    top = found["activations"] - rank.last * last - one.top
    layer = rank.exchanged["BW"]
    moments = [
        (left, sums + rank.words * last + layer + before, rank.calm),
        (left, sums + layers + rank.words * last + rank.meet, rank.calm),
        (left, sums + layers + ends, rank.calm - rank.tail * last),  # the head's weights have gone
        (top, sums + layer, rank.calm),
        *((left + held, sums, working) for held, working in _begun(rank, chunk)),
    ]
    for moment in one.moments():
        now = sums + grows * moment.done / one.layers + rank.words * last
        moments += [(left + held, now, working) for held, working in _in_layer(rank, chunk, moment)]
        if moment.treated == "away" and not rank.handed:  # all that the layer kept is there yet
            moments.append((left + moment.held, now + rank.layer, rank.closing))
        # When a layer's gradients are exchanged, what it kept has gone.
        kept = 0.0 if moment.treated == "again" else one.each
        moments.append((left + moment.held - kept, now + layer, rank.calm))
    return [found | {"activations": held, "gradients": g, "working": w} for held, g, w in moments]


def _begun(rank: RankSizes, chunk: int) -> Iterator[tuple[float, float]]:
    """As the backward of a chunk begins: bytes that it keeps, and what comes and goes. Gradients of the last layer's
    MLP are beside all that the layer keeps; that of its output is the message that came, unless it is made here."""
    one, last = rank.passes[chunk], rank.groups[chunk] == rank.ends
    kept = rank.full[chunk] - rank.last * last
    yield rank.full[chunk] + one.leaving, rank.calm / 2 * last
    if one.begins_again:
        yield kept, rank.working - rank.stream * (not last)
    else:
        yield kept + rank.beside, _calm(rank, rank.stream * (not last))
    if rank.gather:
        yield kept, rank.gather + rank.calm / 2


def _in_layer(rank: RankSizes, chunk: int, moment: Moment) -> Iterator[tuple[float, float]]:
    """Of a layer's backward: bytes that layers keep, and what comes and goes beside."""
    came = rank.stream * (moment.top and rank.groups[chunk] < rank.ends)  # a message
    gathered = rank.light - rank.calm
    if moment.treated == "again":
        yield moment.held, rank.working - came
    elif moment.treated == "kept":
        yield moment.held + rank.beside, _calm(rank, came)
    else:
        yield moment.held, rank.inside - came + gathered
        yield moment.held + rank.outputs, rank.closing + gathered
        if rank.gather:
            yield moment.held - moment.below, rank.gather + rank.calm / 2


def _calm(rank: RankSizes, came: float) -> float:
    """What comes and goes as a layer's backward begins that keeps its activations. came: bytes that are a message."""
    return max(_light(rank), rank.first - came + rank.light - rank.calm)


def _light(rank: RankSizes) -> float:
    """What comes and goes beside a layer that is not recomputed."""
    return min(rank.working, rank.light)
