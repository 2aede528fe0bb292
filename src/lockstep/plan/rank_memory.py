"""Memory of one rank at every step of its schedule: what stays, what each step holds, the peak and its moment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.errors import LockstepError
from lockstep.given import instance, whole
from lockstep.parallel.schedules import Step, Table, embedding_rows
from lockstep.parallel.tree import nodes_of, spread
from lockstep.plan.columns import Column, Columns, layout_columns
from lockstep.plan.layout import Batch, Layout, check_layout
from lockstep.plan.memory import (
    MARGIN,
    away_layers,
    buffer_bytes,
    deferred_bytes,
    exchanged_bytes,
    gather_copies,
    gathers,
    largest_bytes,
    logits_bytes,
    loss_gradients,
    message_bytes,
    mlp_gradient_bytes,
    plain_layer_bytes,
    recompute_bytes,
    spread_gradients,
    state_bytes,
    sums_when_reducing,
    unit_bytes,
    unit_copies,
    waiting_sums,
)
from lockstep.plan.named_shape import model_shape
from lockstep.plan.parameters import expert_parameters
from lockstep.plan.refine import layers_of_chunks, table_of
from lockstep.plan.shape import ModelShape
from lockstep.plan.simulate import held_by_chunks
from lockstep.plan.streams import streams_held


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. ``fixed``: parts that stay all the time. ``steps``: every step of the rank's row of the
    schedule with the activations that are held as it begins; ``moments``: the most at every step, and after the last
    one while gradients are reduced, by kind (gradients, activations, loss,
    working, messages)."""

    rank: int
    stage: int
    fixed: dict[str, float]
    steps: tuple[tuple[str, float], ...]
    moments: tuple[dict[str, float], ...]

    @property
    def peak(self) -> float:
        """The most bytes at any step, with the margin for fragmentation on all but the buffers."""
        return self.at(self.peak_step)

    @property
    def tensors(self) -> float:
        """The most bytes of tensors at any step: what the dry-run of the rank sees, without buffers and margin."""
        return max(map(self._held, range(len(self.moments))))

    @property
    def peak_step(self) -> int:
        """The position of the step at which the peak is reached first; ``len(steps)``: when gradients are reduced."""
        return int(np.argmax([self._held(i) for i in range(len(self.moments))]))

    @property
    def peak_name(self) -> str:
        """That step, such as ``BW7``."""
        return self.steps[self.peak_step][0] if self.peak_step < len(self.steps) else "reduction"

    def at(self, step: int) -> float:
        """Bytes at the worst moment of a step."""
        return self._held(step) * (1 + MARGIN) + self.fixed["buffers"]

    def _held(self, step: int) -> float:
        stays = sum(value for name, value in self.fixed.items() if name != "buffers")
        return stays + sum(self.moments[step].values())


def rank_memory(
    model: str | Path | Mapping[str, Any] | ModelShape, layout: Layout, batch: Batch, rank: int = 0
) -> RankMemory:
    """The memory of a rank of the mesh (pp outermost, then dp, cp, tp) over its schedule.

    Raises LockstepError for a rank that the mesh does not have, or a layout that suits neither model nor batch.
    """
    shape = model_shape(model)
    check_layout(layout, shape, batch, instance(layout, Layout, "layout").devices)
    if whole(rank, "rank", least=0) >= layout.devices:
        raise LockstepError(f"rank {rank} is not in the mesh: {layout.describe()} has ranks 0 to {layout.devices - 1}.")
    stage = rank // (layout.dp * layout.cp * layout.tp)
    rows = layout_columns(shape, [layout], batch)
    table = table_of(layout.schedule, layout.pp, layout.micro_batches(batch), layout.chunks)
    layers = layers_of_chunks(layout, shape.layers)
    mine = _stage_rows(rows, layout, stage, float(sum(layers[stage])))
    last = table.groups - 1 in (groups := [table.group(stage, chunk) for chunk in range(layout.chunks)])
    uses = float(0 in groups) + float(last and not (shape.tied and 0 in groups))
    owns = uses - float(shape.tied and 0 in groups and not last)  # a tied embedding is the last stage's
    weights, _, _ = (float(n[0]) for n in state_bytes(mine, np.array([uses])))
    _, gradient, optimizer = (float(n[0]) for n in state_bytes(mine, np.array([owns])))
    if gathers(mine)[0]:  # a tied embedding that another stage owns is whole here
        weights += (uses - owns) * float(unit_bytes(mine)[1][0]) * (1 - 1 / float(mine.sharing[0]))
    fixed = {"weights": weights, "optimizer": optimizer, "buffers": float(buffer_bytes(mine)[0])}
    place = {"dp": rank // (layout.cp * layout.tp) % layout.dp, "cp": rank // layout.tp % layout.cp}
    streams = _streams(layout.schedule, layout.pp, layout.micro_batches(batch), layout.chunks, stage)
    walk = _Walk(table, streams, stage, layers, mine, gradient, shape, place)
    steps = tuple((str(step), float(n)) for step, n in zip(table.rows[stage], walk.activations, strict=True))
    return RankMemory(rank, stage, fixed, steps, tuple(walk.moments()))


class _Walk:
    """A rank's row of the schedule, step by step. ``gradient``: bytes of one sum of the rank's gradients."""

    def __init__(
        self, table: Table, streams: Sequence[int], stage: int, layers: list[list[int]], mine: Columns, gradient: float,
        shape: ModelShape, place: Mapping[str, int],
    ) -> None:  # fmt: skip
        self.table, self.streams, self.stage, self.mine, self.tied = table, streams, stage, mine, shape.tied
        self.groups = [table.group(stage, chunk) for chunk in range(table.chunks)]
        self.ends = table.groups - 1
        apart = shape.tied and shape.states == "masters" and self.ends in self.groups and 0 not in self.groups
        self.rows_after = embedding_rows(table) if apart else {}
        self.words = 4.0 * float((mine.vocab * mine.hidden / mine.tp)[0])
        self.summed = self.words / float(mine.sharing[0]) if mine.fsdp[0] >= 2 else self.words
        self.mixed = shape.states == "mixed"
        later, head = float(deferred_bytes(mine)[0]), float(loss_gradients(mine)[0])
        mine_and_head = list(zip(layers[stage], self.groups, strict=True))
        self.passes = list(_passes(mine, layers[stage]))
        self.copies, self.layer = float(unit_copies(mine)[0]), float(unit_bytes(mine)[0][0])
        self.full = [one.kept + head * (g == self.ends) for one, g in zip(self.passes, self.groups, strict=True)]
        self.both = shape.tied and self.ends > 0 and {0, self.ends} <= set(self.groups)
        # What waits between B and W: inputs and output gradients of the products, the gradients of embedding and head.
        self.late = [later * n + self.words * self._waiting_ends(g) for n, g in mine_and_head]
        self.given = [bool(self.copies) and not (self.tied and self.ends) and g in (0, self.ends) for g in self.groups]
        """By chunk, whether embedding or head gives its gradient away in B."""
        self.activations = held_by_chunks(table, stage, self.full, self.late)
        self.gradient = self._spread(gradient, layers[stage])
        self.waiting: list[float] = waiting_sums(mine, np.arange(table.micro_batches + 1.0)).tolist()
        """Sums of a chunk's gradients that are there after so many micro-batches."""
        others = float(spread_gradients(mine)[0]) / sum(layers[stage])
        self.others = [others * n for n in layers[stage]]
        self.ranks = float(mine.ep[0])
        self.beside = float(mlp_gradient_bytes(mine)[0])
        # Of a layer that is recomputed: the last product's input and output gradient, which wait for W.
        middle = (1 - mine.moe) * mine.intermediate / mine.tp
        self.put_off = 2.0 * float((mine.tokens * (mine.hidden + middle))[0])
        self.tail = self.words if gathers(mine)[0] else 0.0  # the head, from a micro-batch's loss to its backward
        self.working = float(recompute_bytes(mine)[0]) - self.tail
        self.calm = 8.0 * float(mine.tokens[0] * mine.hidden[0])  # gradients of the stream
        copies = float(gather_copies(mine)[0])
        self.light, self.gathered = self.calm + copies * self.layer, copies * self.words
        self.exchanged = {kind: float(exchanged_bytes(mine, kind == "W")[0]) for kind in ("W", "BW")}
        self.loss = float(logits_bytes(mine)[0]) - head
        sends_rows = 0 in self.groups and self.tied and self.ends > 0 and not self.both and not self.mixed
        # Rows of a tied embedding's gradient that were sent to the stage that owns it; they stay until the end.
        self.rows = sends_rows * 4.0 * float((mine.hidden * np.minimum(mine.vocab / mine.tp, mine.head_tokens))[0])
        self.message = 0.0 if self.mixed else float(message_bytes(mine)[0])
        self.handed = (2.0 if place["cp"] + 1 < mine.cp[0] else 1.0) if mine.ours[0] and mine.cp[0] > 1 else 0.0
        self.largest, self.nodes = float(largest_bytes(mine)[0]), 1
        self.sent: float | None = None
        """Sums of a chunk's gradients when they are on their way to other replicas; None where none are sent then."""
        if mine.ours[0] and mine.fsdp[0] < 2 and mine.dp[0] > 1:
            leaves = table.micro_batches * int(mine.dp[0]) // int(mine.group_size[0])
            self.sent, self.nodes = _sums_on_their_way(leaves, int(mine.dp[0]), place["dp"])

    def _waiting_ends(self, group: int) -> int:
        """Gradients of embedding and head that a group's B leaves for W. Where those of layers are given away at once,
        so are these, unless they have another half; and the rows of an embedding that another stage owns."""
        shared = self.tied and self.ends > 0
        ends = (group == self.ends) + (group == 0 and not (shared and not self.both))
        return 0 if self.copies and not shared else ends

    def _spread(self, gradient: float, layers: list[int]) -> list[float]:
        """One sum of gradients by chunk: layers, and embedding and head where they are."""
        shared = self.tied and self.ends > 0
        heads = [g == self.ends and not (self.tied and g == 0) for g in self.groups]
        ends = [self.summed * ((g == 0 and not shared) + h) for g, h in zip(self.groups, heads, strict=True)]
        scale = max(0.0, gradient - sum(ends)) / sum(layers)
        return [scale * n + end for n, end in zip(layers, ends, strict=True)]

    def moments(self) -> Iterator[dict[str, float]]:
        """The worst moment of every step, then that of the reduction."""
        done, halves, streams = [0] * self.table.chunks, self._halves(), iter(self.streams)
        open_heads, ahead, rows = self._open_heads(), self._ahead(), 0
        for step, activations in zip(self.table.rows[self.stage], self.activations, strict=True):
            opened = next(open_heads)
            found = [self._moment(part, float(activations), done, opened) for part in step.parts]
            waiting = next(halves) + next(ahead)
            found = [moment | {"gradients": moment["gradients"] + waiting} for moment in found]
            messages = self.message * next(streams) + self.rows * rows
            yield max(found, key=lambda m: sum(m.values())) | {"messages": messages}
            for part in step.parts:
                rows += part.kind in ("B", "BW") and self.groups[part.chunk] == 0
                done[part.chunk] += part.kind in ("W", "BW")
        sums = 1.0 if self.mixed else float(sums_when_reducing(self.mine)[0])
        if self.copies and self.ranks > 1 and self.mine.fsdp[0] == 2:  # of an expert there are fewer replicas
            fewer = float((expert_parameters(self.mine) * (1 - 1 / self.mine.ep))[0]) * 4
            yield {"gradients": sum(self.gradient) * sums - fewer}
        else:
            yield {"gradients": sum(self.gradient) * (sums if self.sent is None else self.sent)}

    def _halves(self) -> Iterator[float]:
        """For every step, bytes of a tied embedding's gradients that wait, as it begins, for those of its other use (in
        V placement of the same rank, otherwise rows from the first stage), or these for them; less what its sum is then
        behind the others."""
        own, came = set[int](), set[int]()
        for position, step in enumerate(self.table.rows[self.stage]):
            behind = self.waiting[len(own)] - self.waiting[len(own & came)]
            yield self.words * len(own ^ came) - self.summed * behind if self.rows_after or self.both else 0.0
            for part in step.parts:
                if part.kind in ("W", "BW") and self.groups[part.chunk] == self.ends:
                    own.add(part.micro_batch)
                if part.kind in ("W", "BW") and self.groups[part.chunk] == 0:
                    came.add(part.micro_batch)
            came.update(self.rows_after.get(position, []))

    def _open_heads(self) -> Iterator[bool]:
        """For every step, whether the head's weights are there, gathered for a micro-batch's loss, as it begins."""
        count = 0
        for step in self.table.rows[self.stage]:
            yield bool(self.tail and count)
            for part in step.parts:
                if self.groups[part.chunk] == self.ends:
                    count += {"F": 1, "B": -1, "BW": -1}.get(part.kind, 0)

    def _ahead(self) -> Iterator[float]:
        """For every step, bytes that sums of embedding and head, which B gave away, are ahead of those of layers."""
        backs, done = [0] * len(self.groups), [0] * len(self.groups)
        for step in self.table.rows[self.stage]:
            more = [self.waiting[b] - self.waiting[w] for b, w in zip(backs, done, strict=True)]
            yield self.summed * sum(n for n, given in zip(more, self.given, strict=True) if given)
            for part in step.parts:
                backs[part.chunk] += part.kind in ("B", "BW")
                done[part.chunk] += part.kind in ("W", "BW")

    def _moment(self, step: Step, activations: float, done: list[int], opened: bool) -> dict[str, float]:
        chunk = step.chunk
        if self.mixed:
            sums, growing = sum(self.gradient), 0.0
        else:
            sums = sum(self._waits(c, done) for c in range(len(done)))
            growing = self.gradient[chunk] + self._experts_grow(chunk, done[chunk])
        found = {"gradients": sums, "activations": activations, "working": self.working}
        if self.sent is not None and step.kind in ("W", "BW") and done[chunk] + 1 == self.table.micro_batches:
            ending = self._sent_off(found, step, done)
            usual = self._usual(found, step, done, sums, growing, opened)
            return max(ending, usual, key=lambda m: sum(m.values()))
        return self._usual(found, step, done, sums, growing, opened)

    def _waits(self, chunk: int, done: list[int]) -> float:
        """Bytes of a chunk's sums of gradients. When it has all of them, and those of the layers behind, they are on
        their way to the other replicas."""
        behind = (c for c in range(len(done)) if self.groups[c] >= self.groups[chunk])
        if self.sent is not None and all(done[c] == self.table.micro_batches for c in behind):
            return self.gradient[chunk] * self.sent  # those of other ranks' micro-batches are added up by then
        return (self.gradient[chunk] + self.others[chunk]) * self.waiting[done[chunk]]

    def _sent_off(self, found: dict[str, float], step: Step, done: list[int]) -> dict[str, float]:
        """The end of a chunk's last step: its gradients are sent off one after the other. Where W gives them as they
        are made, what it makes them of is still there, and if they were handed on between ranks of cp, all of them, or
        those of a layer. Of slices that tensor ranks cut a copy is sent."""
        chunk = step.chunk
        after = [n + (c == chunk) for c, n in enumerate(done)]
        gradients = sum(self._waits(c, after) for c in range(len(after)))
        ends = self.words * ((self.groups[chunk] == self.ends) + (self.groups[chunk] == 0))
        if not self.copies:
            gradients += self._let_go_late(chunk)
        elif self.handed:
            gradients += self.handed * (self.gradient[chunk] if step.kind == "W" else self.layer)
        if self.mine.tp[0] > 1:
            gradients += min(self.words, ends)
        freed = self.full[chunk] if step.kind == "BW" else ends if self.copies else self.late[chunk]
        return found | {"gradients": gradients, "activations": found["activations"] - freed, "working": 0.0}

    def _let_go_late(self, chunk: int) -> float:
        """Where all gradients are sent when the last one was given: bytes of that one, if it was added into another;
        and of the last bucket's nodes but the first, which becomes the result."""
        last, count = self.groups[chunk] == self.ends and not (self.tied and self.ends > 0), self.table.micro_batches
        added = self.waiting[count] < self.waiting[count - 1] + 1
        size, held = float(self.mine.bucket_mb[0]) * 2**20, 0.0
        layers = self.passes[chunk].layers
        for unit in [self.words * last, *[self.layer] * layers, self.words * (self.groups[chunk] == 0)]:
            held = unit + (held if held < size else 0.0) if unit else held
        return added * (self.words if last else self.largest) + (self.nodes - 1) * held

    def _usual(
        self, found: dict[str, float], step: Step, done: list[int], sums: float, growing: float, opened: bool
    ) -> dict[str, float]:
        """The worst moment of a step, but for what is sent off at its end. opened: the head is gathered already."""
        chunk = step.chunk
        if step.kind == "F":
            each = self._forward(found, chunk, opened)
        elif step.kind == "B":
            each = self._backward(found, chunk, sums)
        elif self.copies:
            grows = growing * (self.waiting[done[chunk] + 1] - self.waiting[done[chunk]])
            each = self._exchange(found, chunk, sums, grows, step.kind == "BW")
        else:
            each = self._grow(found, chunk, sums, growing, step.kind == "BW")
        worst = max(each, key=lambda m: sum(m.values()))
        return worst | {"working": worst["working"] + self.tail * opened}

    def _forward(self, found: dict[str, float], chunk: int, opened: bool) -> list[dict[str, float]]:
        """The moments of F: a layer, and before them the embedding and after them the loss, for which weights that are
        sharded are gathered."""
        activations, group = found["activations"], self.groups[chunk]
        moving = max(0.0, self.passes[chunk].moving - self.full[chunk])
        each = [found | {"activations": activations + moving, "working": min(self.working, self.light)}]
        if group == 0 and not (self.tied and not self.both and self.ends):
            each.append(found | {"activations": activations - self.full[chunk], "working": self.gathered})
        if group == self.ends:
            here = 0.0 if opened else self.tail
            each.append(found | {"loss": self.loss, "working": here if self.tail else each[0]["working"]})
            each.append(found | {"working": 0.0 if opened else self.gathered})
        return each

    def _backward(self, found: dict[str, float], chunk: int, sums: float) -> list[dict[str, float]]:
        """The moments of B, at whose end the gradients of embedding or head may be given away."""
        left = found["activations"] - self.full[chunk]
        one, late = self.passes[chunk], self.late[chunk]
        head = self.words * (self.given[chunk] and self.groups[chunk] == self.ends)
        embedded = self.words * (self.groups[chunk] == 0 and not self._waiting_ends(0))
        # The output gradients of the last layer's MLP are kept for W while its activations are still there.
        first = self.full[chunk] + self.beside, self._working(one.begins_again)
        held = [first, (late + head, min(self.working, self.light)), (late + embedded, self.calm)]
        for own, part, again in (*one.moments(), *one.last()):
            held.append((own + part * late + head, self._working(again) + self.put_off * again))
        each = [found | {"activations": left + own, "working": working} for own, working in held]
        if self.given[chunk]:
            closed = self.tail * (self.groups[chunk] == self.ends)
            end = {"activations": left + late, "gradients": sums + self.copies * self.words}
            each.append(found | end | {"working": self.calm - closed})
        return each

    def _grow(
        self, found: dict[str, float], chunk: int, sums: float, growing: float, whole: bool
    ) -> list[dict[str, float]]:
        """The moments in which the gradient grows while what the micro-batch held goes (BW), or beside it (W)."""
        if not whole:
            # All are handed on between ranks of cp before the first is given away, and come back as new ones.
            sums = sums + self.handed * self.gradient[chunk]
            before = self.words * self._waiting_ends(self.groups[chunk])
            return [found | {"gradients": sums + max(0.0, growing - before), "working": 0.0}]
        left = found["activations"] - self.full[chunk]
        twice = self.words if self.tied and self.ends == 0 else 0.0  # the embedding's two gradients before their sum
        grown = [found | {"working": self._working(self.passes[chunk].begins_again)}]
        grown.append(found | {"activations": left, "gradients": sums + growing + twice})
        for own, part, again in self.passes[chunk].moments():
            now = {"activations": left + own, "gradients": sums + growing * part}
            grown.append(found | now | {"working": self._working(again)})
        return grown

    def _experts_grow(self, chunk: int, done: int) -> float:
        """Of experts that are held for other ranks too: how much more than one sum a micro-batch's gradients add. They
        come layer by layer, and every other time they are added into what waits."""
        others = self.others[chunk]
        return -others / max(self.ranks - 1, 1) if done % 2 else others

    def _working(self, again: bool) -> float:
        """Of a layer's backward, which is recomputed or not."""
        return self.working if again else min(self.working, self.light)

    def _exchange(
        self, found: dict[str, float], chunk: int, sums: float, grows: float, whole: bool
    ) -> list[dict[str, float]]:
        """The moments in which gradients go as soon as a layer's are made; of BW those of embedding and head, whole
        until then, at the end. grows: what the sums are more, or less, after this micro-batch."""
        first, last = self.groups[chunk] == 0, self.groups[chunk] == self.ends
        one = self.passes[chunk]
        before = grows * (one.layers - 1) / one.layers
        if not whole:
            layers = grows * (1 - self.summed * self.given[chunk] / self.gradient[chunk])
            exchanged = self.exchanged["W"]
            if self.handed:  # between ranks of cp all are handed on, and are there until the last is given away
                all_layers = self.layer * one.layers
                sums, exchanged = sums + all_layers, max((self.handed - 1) * all_layers, (self.copies - 1) * self.layer)
            most = max(layers, layers * (one.layers - 1) / one.layers + exchanged)
            each = [found | {"gradients": sums + most, "working": 0.0}]
            if waits := self.words * self._waiting_ends(self.groups[chunk]):
                end = {"activations": found["activations"] - self.late[chunk], "working": 0.0}
                each.append(found | end | {"gradients": sums + grows + self.copies * waits})
            return each
        ends = max(first, last) if self.tied else first + last
        left = found["activations"] - self.full[chunk]
        at_end = sums + grows + self.words * (ends + (self.copies - 1) * (ends > 0))
        top = found["activations"] - one.top
        layer = self.exchanged["BW"]
        moments = [
            (left, sums + self.words * last + layer + before, self.calm),
            (left, at_end, self.calm - self.tail * last),
            (top, sums + layer, self.calm),
        ]
        for own, part, again in one.moments():
            moments += [(left + own, sums + grows * part + self.words * last, self._working(again))]
            moments += [(left + own, sums + layer + grows * part + self.words * last, self.calm)]
        freed = [found | {"activations": held, "gradients": g, "working": w} for held, g, w in moments]
        return [found | {"working": self._working(one.begins_again)}, *freed]


def _passes(mine: Columns, layers: list[int]) -> Iterator[_Pass]:
    """Of every chunk of a stage with so many layers: the stage's first layers are recomputed, the next offloaded."""
    again = round(float((mine.slow_layers * mine.full)[0]))
    away = round(float(away_layers(mine)[0]))
    for count in layers:
        recomputed = min(count, again)
        offloaded = min(count - recomputed, away)
        yield _Pass(mine, count, recomputed, offloaded)
        again, away = again - recomputed, away - offloaded


class _Pass:
    """What a chunk holds of the micro-batch that it works on, where layers are treated differently: the first ones are
    recomputed, the next offloaded, the last stay."""

    def __init__(self, mine: Columns, layers: int, again: int, away: int) -> None:
        self.each, self.input = float(plain_layer_bytes(mine)[0]), float(message_bytes(mine)[0])
        self.layers, self.again, self.away = layers, again, away
        self.stay = layers - again - away

    @property
    def kept(self) -> float:
        """Bytes of a micro-batch, from its forward pass to its backward."""
        return self.again * self.input + self.stay * self.each

    @property
    def begins_again(self) -> bool:
        """Whether the last layer is recomputed, and so all are."""
        return self.stay + self.away <= 0 < self.again

    @property
    def top(self) -> float:
        """Bytes that the last layer keeps."""
        return self.input if self.begins_again else self.each

    def last(self) -> Iterator[tuple[float, float, bool]]:
        """As `moments`: where the layer that comes last is recomputed, that one."""
        if self.again:
            yield self.input, (self.layers - 1) / self.layers, True

    @property
    def moving(self) -> float:
        """Bytes in the forward pass, while an offloaded layer leaves and the next is computed."""
        return self.again * self.input + min(2.0, self.away + self.stay) * self.each if self.away else 0.0

    def moments(self) -> Iterator[tuple[float, float, bool]]:
        """Of the backward pass: bytes, which part of the layers is done, and whether a layer is recomputed then. An
        offloaded layer comes back while the one above it works, and is freed when its own backward is over."""
        inputs = self.again * self.input
        if self.away and self.stay >= 1:
            yield inputs + 2 * self.each, (self.stay - 1) / self.layers, False
        if self.away >= 2:
            yield inputs + 2 * self.each, (self.stay + self.away - 1) / self.layers, False
        if self.away:
            yield inputs + self.each, (self.stay + self.away) / self.layers, False
        if self.again:
            yield inputs, (self.stay + self.away) / self.layers, True


@lru_cache(maxsize=4096)
def _streams(name: str, stages: int, micro_batches: int, chunks: int, device: int) -> tuple[int, ...]:
    """`streams_held` of a device, which many layouts share: their sizes do not matter."""
    return tuple(streams_held(table_of(name, stages, micro_batches, chunks), device))


@lru_cache
def _sums_on_their_way(leaves: int, replicas: int, place: int) -> tuple[float, int]:
    """Sums of its gradients that the replica at a place has, when all are on their way at the end of a step: the
    result, the nodes of a tree of so many leaves that it sends, and its share of those that it receives. And the number
    of these nodes."""
    nodes = [nodes_of(part.start, part.stop, leaves) for part in spread(leaves, replicas)]
    others = sum(len(theirs) for i, theirs in enumerate(nodes) if i != place)
    return 1.0 + len(nodes[place]) + others / replicas, len(nodes[place])


def _stage_rows(rows: Columns, layout: Layout, stage: int, layers: float) -> Columns:
    """The row as seen from a stage with so many layers."""
    count: Column = np.array([layers])
    again, away = (np.array([float(counts[stage])]) for counts in (layout.recomputed, layout.offloaded))
    return replace(rows, slow_layers=count, last_layers=count, recompute_layers=again, offload_layers=away)
