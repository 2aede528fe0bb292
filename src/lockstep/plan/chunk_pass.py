"""What a chunk holds of one micro-batch, where layers are treated differently: recomputed, offloaded, or kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from lockstep.plan.columns import Columns
from lockstep.plan.kept_bytes import away_layers, message_bytes, plain_layer_bytes


class Moment(NamedTuple):
    """A layer's backward. held: bytes that layers keep; done: layers whose backward is over before; how the layer is
    treated: what it keeps goes product by product (kept, again: recomputed) or stays to its end (away: offloaded); top:
    whether it is the chunk's last layer, which comes first; below: of the bytes those that come back meanwhile."""

    held: float
    done: int
    treated: Literal["kept", "away", "again"]
    top: bool
    below: float = 0.0


def passes(mine: Columns, layers: list[int], groups: Sequence[int]) -> Iterator[Pass]:
    """Of every chunk of a stage with so many layers: the stage's first layers are recomputed, the next offloaded."""
    again = round(float((mine.slow_layers * mine.full)[0]))
    away = round(float(away_layers(mine)[0]))
    for count, group in zip(layers, groups, strict=True):
        recomputed = min(count, again)
        offloaded = min(count - recomputed, away)
        yield Pass(mine, count, recomputed, offloaded, group > 0)
        again, away = again - recomputed, away - offloaded


class Pass:
    """What a chunk holds of the micro-batch that it works on, where layers are treated differently: the first ones are
    recomputed, the next offloaded, the last stay. message: its input came from another group, and is not offloaded."""

    def __init__(self, mine: Columns, layers: int, again: int, away: int, message: bool) -> None:
        self.each, self.input = float(plain_layer_bytes(mine)[0]), float(message_bytes(mine)[0])
        self.layers, self.again, self.away = layers, again, away
        self.stay = layers - again - away
        self.first = self.input * (message and away > 0 and not again)
        """Bytes of the input of the layer that is offloaded first, if they stay."""
        self.inputs = again * self.input + self.first

    @property
    def kept(self) -> float:
        """Bytes of a micro-batch, from its forward pass to its backward."""
        return self.inputs + self.stay * self.each

    @property
    def begins_again(self) -> bool:
        """Whether the last layer is recomputed, and so all are."""
        return self.stay + self.away <= 0 < self.again

    @property
    def top(self) -> float:
        """Bytes that the last layer keeps."""
        return self.input if self.begins_again else self.each

    @property
    def moving(self) -> float:
        """Bytes in the forward pass, while an offloaded layer leaves and the next is computed."""
        if not self.away:
            return 0.0
        both = min(2, self.away + self.stay)
        return self.inputs + both * self.each - self.first * (self.away <= both)

    @property
    def leaving(self) -> float:
        """Bytes of the last layer, if it is offloaded: they are there until the next layer that is computed is over."""
        return self._back(self.away - 1) if self.away and not self.stay else 0.0

    @property
    def first_layer(self) -> float:
        """Bytes that are kept when the first layer is over."""
        return self.input if self.again else self.each

    def moments(self) -> Iterator[Moment]:
        """Of the backward pass. An offloaded layer comes back while the one above it works, and is freed when its own
        backward is over."""
        if self.away and self.stay:
            yield Moment(self.inputs + self.each + self._back(self.away - 1), self.stay - 1, "kept", self.stay == 1)
        for left in range(min(2, self.away), 0, -1):  # offloaded layers whose backward is not over
            done, below = self.stay + self.away - left, self._back(0) * (left == 2)
            yield Moment(self.inputs + self._back(left - 1) + below, done, "away", not done, below)
        if self.again:
            yield Moment(self.inputs, self.stay + self.away, "again", self.begins_again)
            yield Moment(self.input, self.layers - 1, "again", self.layers == 1)

    def _back(self, index: int) -> float:
        """Bytes of an offloaded layer that has come back; index: among them."""
        return self.each - self.first * (index == 0)
