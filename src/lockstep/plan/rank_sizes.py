"""How large everything is that a rank holds, comes and goes: what the walk through its schedule adds up."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from lockstep.parallel.schedules import Table, embedding_rows
from lockstep.parallel.tree import nodes_of, spread
from lockstep.plan.chunk_pass import passes
from lockstep.plan.columns import Columns
from lockstep.plan.gathered_bytes import gather_copies, gathers, recompute_bytes
from lockstep.plan.gradient_bytes import (
    deferred_bytes,
    deferred_inputs,
    defers,
    early_expert_bytes,
    exchanged_bytes,
    first_gradient_bytes,
    held_gradient_bytes,
    largest_bytes,
    mlp_gradient_bytes,
    spread_gradients,
    unit_bytes,
    unit_copies,
)
from lockstep.plan.kept_bytes import forward_bytes, message_bytes
from lockstep.plan.loss_bytes import head_input_bytes, logits_bytes, loss_gradients
from lockstep.plan.shape import ModelShape
from lockstep.plan.simulate import held_by_chunks
from lockstep.plan.streams import Held


class RankSizes:
    """What a rank's chunks are, and how many bytes everything is. ``gradient``: of one sum of the rank's gradients."""

    def __init__(
        self, table: Table, streams: Sequence[Held], stage: int, layers: list[list[int]], mine: Columns,
        gradient: float, shape: ModelShape, replica: int,
    ) -> None:  # fmt: skip
        self.table, self.streams, self.stage, self.mine, self.tied = table, streams, stage, mine, shape.tied
        self.mixed, self.split, self.ends = shape.states == "mixed", table.split_backward, table.groups - 1
        self.groups = [table.group(stage, chunk) for chunk in range(table.chunks)]
        self.both = shape.tied and self.ends > 0 and {0, self.ends} <= set(self.groups)
        self.words = 4.0 * float((mine.vocab * mine.hidden / mine.tp)[0])
        self.summed = self.words / float(mine.sharing[0]) if mine.fsdp[0] >= 2 else self.words
        self.copies, self.layer = float(unit_copies(mine)[0]), float(unit_bytes(mine)[0][0])
        self._kept(layers[stage])
        self._sums(layers[stage], gradient, replica)
        self._worked_with()
        self._gathered()
        self._between_stages()
        self._sent_off(replica)

    def _kept(self, layers: list[int]) -> None:
        """What is kept of a micro-batch, from F to B and from B to W."""
        mine, head = self.mine, float(loss_gradients(self.mine)[0])
        self.passes = list(passes(mine, layers, self.groups))
        self.full = [one.kept + head * (g == self.ends) for one, g in zip(self.passes, self.groups, strict=True)]
        # What waits between B and W: inputs and output gradients of the products, the gradients of embedding and head.
        inputs, self.experts = float(deferred_inputs(mine)[0]), float(early_expert_bytes(mine)[0])
        later = float(deferred_bytes(mine)[0]) + (0.0 if self.copies else self.experts)
        self.outputs = (later - inputs) * bool(defers(mine)[0])
        pairs = zip(layers, self.groups, strict=True)
        self.late = [later * n + self.words * self.waiting_ends(group) for n, group in pairs]
        self.last = max(
            0.0, head - self.words
        )  # the stream before the last norm, and the gradient of what comes out of it
        self.activations = held_by_chunks(self.table, self.stage, self.full, self.late)
        self.loss = float(logits_bytes(mine)[0]) - head

    def _sums(self, layers: list[int], gradient: float, replica: int) -> None:
        """Sums of gradients that wait."""
        mine = self.mine
        self.given = [bool(self.copies) and not (self.tied and self.ends) and g in (0, self.ends) for g in self.groups]
        """By chunk, whether embedding or head gives its gradient away in B."""
        self.gradient = self._spread(gradient, layers)
        count, replicas, group = self.table.micro_batches, int(mine.dp[0]), int(mine.group_size[0])
        self.waiting = _waiting(count, replicas, group, replica, mine.fsdp[0] >= 2)
        """Sums of a chunk's gradients that are there after so many micro-batches."""
        others = float(spread_gradients(mine)[0]) / sum(layers)
        self.others, self.ranks = [others * n for n in layers], float(mine.ep[0])
        # Where the two uses of a tied embedding meet, their gradients and the sum of both.
        self.meet = 2 * self.words if self.tied and not self.ends else 0.0

    def _worked_with(self) -> None:
        """What comes and goes beside what is kept."""
        mine = self.mine
        self.tail = self.words if gathers(mine)[0] else 0.0  # the head, from a micro-batch's loss to its backward
        self.working = float(recompute_bytes(mine)[0]) - self.tail
        self.calm = 8.0 * float(mine.tokens[0] * mine.hidden[0])  # gradients of the stream
        self.first = float(first_gradient_bytes(mine)[0])
        self.forward = float(forward_bytes(mine)[0])
        self.stream = float(message_bytes(mine)[0])
        self.head_input = float(head_input_bytes(mine)[0])
        self.beside = float(mlp_gradient_bytes(mine)[0]) * bool(defers(mine)[0])
        self.inside, self.closing = (float(n[0]) for n in held_gradient_bytes(mine))
        self.largest, self.handed = float(largest_bytes(mine)[0]), bool(mine.ours[0] and mine.cp[0] > 1)
        self.exchanged = {kind: float(exchanged_bytes(mine, kind == "W")[0]) for kind in ("W", "BW")}

    def _gathered(self) -> None:
        """Weights that are sharded, as they are gathered. While a layer computes they are there once; before, while
        they are gathered, more often."""
        copies = float(gather_copies(self.mine)[0])
        self.light, self.gathered = self.calm + self.layer * (copies > 0), copies * self.words
        self.gather = copies * self.layer

    def _between_stages(self) -> None:
        """Messages: streams, and rows of a tied embedding's gradient for the stage that owns it; where those were sent
        they stay until the end."""
        mine, apart = self.mine, self.tied and self.ends > 0 and not self.both and not self.mixed
        self.message = 0.0 if self.mixed else self.stream
        self.rows = apart * 4.0 * float((mine.hidden * np.minimum(mine.vocab, mine.head_tokens) / mine.tp)[0])
        self.takes_rows = bool(apart and self.ends in self.groups)
        self.rows_after = embedding_rows(self.table) if self.takes_rows else {}

    def _sent_off(self, replica: int) -> None:
        """What replicas send one another when all micro-batches are done."""
        mine, self.nodes = self.mine, 1
        self.sent: list[float] = []
        """Sums of each chunk's gradients when they are on their way to other replicas; empty where none are sent."""
        if mine.ours[0] and mine.fsdp[0] < 2 and mine.dp[0] > 1:
            replicas = int(mine.dp[0])
            leaves = self.table.micro_batches * replicas // int(mine.group_size[0])
            self.nodes, others = _nodes(leaves, replicas, replica)
            self.bucket = float(mine.bucket_mb[0]) * 2**20
            self.buckets = [self._buckets(chunk) for chunk in range(self.table.chunks)]
            self.sent = [1.0 + self.nodes + others * share for share in self._shares(replica / replicas, 1 / replicas)]

    def waiting_ends(self, group: int) -> int:
        """Gradients of embedding and head that a group's B leaves for W. Where those of layers are given away at once,
        so are these, unless they have another half; and the rows of an embedding that another stage owns."""
        shared = self.tied and self.ends > 0
        ends = (group == self.ends) + (group == 0 and not (shared and not self.both))
        return 0 if self.copies and not shared else ends

    def owned_ends(self, group: int) -> int:
        """Of embedding and head, as many as a group's sum of gradients has."""
        return (group == 0 and not (self.tied and self.ends > 0)) + (
            group == self.ends and not (self.tied and not group)
        )

    def _spread(self, gradient: float, layers: list[int]) -> list[float]:
        """One sum of gradients by chunk: layers, and embedding and head where they are."""
        ends = [self.summed * self.owned_ends(group) for group in self.groups]
        scale = max(0.0, gradient - sum(ends)) / sum(layers)
        return [scale * n + end for n, end in zip(layers, ends, strict=True)]

    def _buckets(self, chunk: int) -> list[float]:
        """Bytes of a chunk's buckets in the order in which they are sent: the head, then layers from the last on, about
        matrix by matrix, and the embedding, which may be the head."""
        last, shared = self.groups[chunk] == self.ends, self.tied and self.ends > 0
        first = self.groups[chunk] == 0 or (last and shared and not self.both)
        count = max(1, round(self.layer / self.largest))
        matrices = [self.layer / count] * count * self.passes[chunk].layers
        found = [0.0]
        for matrix in [self.words * (last and not shared), *matrices, self.words * first]:
            if found[-1] >= self.bucket:
                found.append(0.0)
            found[-1] += matrix
        return found

    def _shares(self, start: float, share: float) -> list[float]:
        """By chunk, which part of its gradients this replica adds up: of all of the rank's, in the order of the model,
        each replica has a run."""
        first = self.words if self.tied and (self.both or not self.ends) else 0.0  # the embedding, the last chunk's
        total, before, found = sum(self.gradient), first, [0.0] * len(self.groups)
        start, stop = start * total, (start + share) * total
        for chunk in sorted(range(len(self.groups)), key=lambda c: self.groups[c]):
            size = self.gradient[chunk] - first * (self.groups[chunk] == self.ends)
            found[chunk] = max(0.0, min(stop, before + size) - max(start, before))
            found[chunk] += max(0.0, min(stop, first) - start) * (self.groups[chunk] == self.ends)
            before += size
        return [part / size if size else 0.0 for part, size in zip(found, self.gradient, strict=True)]


@lru_cache
def _waiting(micro_batches: int, replicas: int, group: int, place: int, sharded: bool) -> list[int]:
    """Sums of gradients that the replica at a place has after each number of its micro-batches: nodes of the tree over
    all canonical groups, and the sum of a group that is begun. sharded: each has a part of all replicas' sums, which
    work on neighbouring micro-batches."""
    leaves, each = micro_batches * replicas // group, replicas if sharded else 1
    first = 0 if sharded else place * micro_batches // group
    ends = (divmod(done * each, group) for done in range(micro_batches + 1))
    return [len(nodes_of(first, first + whole, leaves)) + (rest > 0) for whole, rest in ends]


@lru_cache
def _nodes(leaves: int, replicas: int, place: int) -> tuple[int, int]:
    """How many nodes of a tree of so many leaves the replica at a place sends, and how many all others do."""
    nodes = [len(nodes_of(part.start, part.stop, leaves)) for part in spread(leaves, replicas)]
    return nodes[place], sum(nodes) - nodes[place]
