"""What a chunk holds of one micro-batch, where layers are treated differently: recomputed, offloaded, or kept."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.plan.columns import Columns
from lockstep.plan.memory import away_layers, message_bytes, plain_layer_bytes


def passes(mine: Columns, layers: list[int]) -> Iterator[Pass]:
    """Of every chunk of a stage with so many layers: the stage's first layers are recomputed, the next offloaded."""
    again = round(float((mine.slow_layers * mine.full)[0]))
    away = round(float(away_layers(mine)[0]))
    for count in layers:
        recomputed = min(count, again)
        offloaded = min(count - recomputed, away)
        yield Pass(mine, count, recomputed, offloaded)
        again, away = again - recomputed, away - offloaded


class Pass:
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

    def moments(self, shared: float = 0.0) -> Iterator[tuple[float, float, bool]]:
        """Of the backward pass: bytes, which part of the layers is done, and whether a layer is recomputed then. An
        offloaded layer comes back while the one above it works, and is freed when its own backward is over. shared: of
        what a layer keeps, bytes that also wait for W."""
        inputs = self.again * self.input
        if self.away and self.stay >= 1:
            yield inputs + 2 * self.each, (self.stay - 1) / self.layers, False
        if self.away >= 2:
            yield inputs + 2 * self.each - shared, (self.stay + self.away - 1) / self.layers, False
        if self.away:
            yield inputs + self.each - shared, (self.stay + self.away) / self.layers, False
        if self.again:
            yield inputs, (self.stay + self.away) / self.layers, True
