"""How fast a model could be served here at most, by arithmetic: its products and attention at the measured matrix peak,
its weights at the measured bandwidth. What a server reaches of it says what is left to gain, and whether a multiple of
another's rate can exist at all."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lockstep.model import Decoder
from lockstep.ops.peaks import matrix_peak, read_bandwidth
from lockstep.train.flops import attention_flops, matrix_weights


@dataclass(frozen=True)
class Limit:
    """layers: FLOPs of a token in the products of the layers. head: of a row of logits. pair: of attention, for a query
    and a key, over all layers. weights: bytes that a step reads. peak: FLOP/s. bandwidth: bytes/s."""

    layers: float
    head: float
    pair: float
    weights: float
    peak: float
    bandwidth: float

    def prompt(self, tokens: int) -> float:
        """FLOPs of reading a prompt, to its first token."""
        return tokens * self.layers + tokens * (tokens + 1) / 2 * self.pair + self.head

    def answer(self, prompt: int, tokens: int) -> float:
        """FLOPs of the tokens after the first one, each a row of its own."""
        rows = tokens - 1
        return rows * (self.layers + self.head) + rows * (prompt + tokens / 2) * self.pair

    def seconds(self, clients: int, prompt: int, output: int) -> float:
        """The least time in which so many prompts are read and so many answers written, all at once."""
        writing = clients * self.answer(prompt, output) / self.peak
        reading_weights = (output - 1) * self.weights / self.bandwidth
        return clients * self.prompt(prompt) / self.peak + max(writing, reading_weights)

    def rate(self, clients: int, prompt: int, output: int) -> float:
        """Output tokens per second, at most."""
        return clients * output / self.seconds(clients, prompt, output)


def limit_of(decoder: Decoder, dtype: torch.dtype = torch.bfloat16) -> Limit:
    """For this model on this machine, whose peaks are measured now."""
    head = decoder.head_weight.numel()
    matrices = matrix_weights(decoder)
    return Limit(
        layers=2.0 * (matrices - head),
        head=2.0 * head,
        pair=attention_flops(decoder.config),
        weights=float(matrices * dtype.itemsize),
        peak=matrix_peak(dtype),
        bandwidth=read_bandwidth(),
    )
