"""The head and its loss on a device that has some segments of the vocabulary, a chunk of rows at a time.

What a row's loss needs of the whole vocabulary is one number of each segment, its log-sum-exp, and the target's logit:
so much is gathered from the devices for each chunk. Gradients are those of `csrc/vocabulary.cpp` by the whole row's
log-sum-exp.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.ops.operators import Numerics
from lockstep.ops.raw.linear import panels
from lockstep.ops.raw.vocabulary import HELD
from lockstep.ops.tree import contiguous_parts, neighbour_sum

Gather = Callable[[Tensor], list[Tensor]]
"""A tensor of every device, in their order"""


@dataclass(frozen=True)
class Segments:
    """A vocabulary cut into ``count`` segments, of which the first ``vocabulary % count`` have one token more than the
    others, and a device that holds ``here`` of them: neighbours, as does each; ``index``: the device's place."""

    vocabulary: int
    count: int
    here: int
    index: int = 0

    def start(self, index: int) -> int:
        """The first token of the device at this place."""
        short, longer = divmod(self.vocabulary, self.count)
        return short * index * self.here + min(index * self.here, longer)

    @property
    def first(self) -> int:
        return self.start(self.index)

    @property
    def held(self) -> int:
        """Tokens of this device."""
        return self.start(self.index + 1) - self.first

    @property
    def rows_at_a_time(self) -> int:
        """Rows of a chunk: the same on every device, and whole tiles of 32 (`csrc/tiles.h`)."""
        return max(32, HELD // (-(-self.vocabulary // self.count) * self.here) // 32 * 32)


class Asked(NamedTuple):
    """What is asked of a loss; as in `linear_cross_entropy`."""

    z_loss: float
    softcap: float
    entropy: bool
    hidden_gradient: bool
    weight_gradient: bool


class PartOfLoss(NamedTuple):
    """loss float32 [], logprobs float32 [T], entropies float32 [T]: of the whole vocabulary. d_hidden float32 [T, D]:
    the sum over this device's segments. d_weight float32 [v, D]. What is not asked for has no element."""

    loss: Tensor
    logprobs: Tensor
    entropies: Tensor
    d_hidden: Tensor
    d_weight: Tensor


def part_of_loss(
    numerics: Numerics, segments: Segments, gather: Gather, hidden: Tensor, weight: Tensor, targets: Tensor,
    token_weights: Tensor, asked: Asked, out: PartOfLoss | None = None, memory: Tensor | None = None,
) -> PartOfLoss:  # fmt: skip
    """hidden [T, D] times this device's weight [v, D], all contiguous. All devices must call it alike. out: memory for
    the results; memory: `working_bytes` to work in."""
    _check_targets(targets, segments.vocabulary)
    if numerics == "fast":
        head: Head = _Plain(weight, hidden.dtype, segments, asked)
    else:
        head = _Contract(weight, hidden.dtype, segments, asked, _Working(segments, hidden, asked, memory))
    found = out or empty_part(hidden, weight, asked)
    found.d_weight.zero_()
    losses = found.logprobs.new_empty(len(hidden), 1)
    for first in range(0, len(hidden), segments.rows_at_a_time):
        chunk = slice(first, first + segments.rows_at_a_time)
        x, target, factor = hidden[chunk], targets[chunk], token_weights[chunk]
        logits = head.logits(x)
        log_z, logprob = _joined(head, segments, gather, logits, target)
        found.logprobs[chunk] = logprob
        of_row = (log_z * log_z * asked.z_loss - logprob) * factor
        losses[chunk, 0] = torch.where(target < 0, torch.zeros_like(of_row), of_row)
        if asked.entropy:
            parts = torch.cat(gather(head.entropies(logits, log_z)), dim=1)
            found.entropies[chunk] = neighbour_sum(list(parts.unbind(1)))
        if asked.hidden_gradient or asked.weight_gradient:
            d_logits = head.gradient(logits, log_z, target, factor)
            if asked.hidden_gradient:
                found.d_hidden[chunk] = head.d_hidden(d_logits)
            if asked.weight_gradient:
                head.add_weight_gradient(d_logits, x, found.d_weight)
    found.loss.copy_(head.total(losses))
    return found


def _joined(head: Head, segments: Segments, gather: Gather, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp of whole rows, and the targets' log-probabilities (of token 0 where there is no target)."""
    token = targets.clamp(min=0) - segments.first
    inside = (token >= 0) & (token < segments.held)
    chosen = logits.gather(1, token.clamp(0, segments.held - 1)[:, None])
    told = torch.cat([head.log_sum_exp(logits), torch.where(inside[:, None], chosen, -torch.inf)], dim=1)
    devices = gather(told)
    log_z = head.join(torch.cat([one[:, :-1] for one in devices], dim=1))
    return log_z, torch.stack([one[:, -1] for one in devices]).amax(0) - log_z


def _check_targets(targets: Tensor, vocabulary: int) -> None:
    if targets.numel() and not targets.is_meta and int(targets.max()) >= vocabulary:
        raise RuntimeError(f"token {int(targets.max())} is not in the vocabulary of {vocabulary}")


def empty_part(hidden: Tensor, weight: Tensor, asked: Asked) -> PartOfLoss:
    """Memory for the results."""
    new, f32 = hidden.new_empty, torch.float32
    return PartOfLoss(
        new((), dtype=f32),
        new(len(hidden), dtype=f32),
        new(len(hidden) if asked.entropy else 0, dtype=f32),
        new(hidden.shape if asked.hidden_gradient else (0,), dtype=f32),
        new(weight.shape if asked.weight_gradient else (0,), dtype=f32),
    )


def working_bytes(segments: Segments, hidden: Tensor, asked: Asked) -> int:
    """What the contract's kernels work in."""
    return sum(_whole_lines(shape, dtype) for shape, dtype in _places(segments, hidden, asked).values())


Shape = tuple[tuple[int, ...], torch.dtype]


def _places(segments: Segments, hidden: Tensor, asked: Asked) -> dict[str, Shape]:
    """The weight packed by columns, and by rows for each segment; logits and their gradient, and the hidden states
    packed by rows, of a chunk."""
    (rows, width), dtype, held = hidden.shape, hidden.dtype, segments.held
    step = min(rows, segments.rows_at_a_time)
    found: dict[str, Shape] = {"columns": ((panels(held), width, 16), dtype), "logits": ((step, held), torch.float32)}
    if asked.hidden_gradient or asked.weight_gradient:
        found["d_logits"] = (step, held), dtype
    if asked.hidden_gradient:
        sizes = [len(part) for part in torch.empty(held, 0).tensor_split(segments.here)]
        found |= {f"rows{i}": ((panels(width), size, 16), dtype) for i, size in enumerate(sizes)}
    if asked.weight_gradient:
        found["x"] = (panels(width), step, 16), dtype
    return found


def _whole_lines(shape: Sequence[int], dtype: torch.dtype) -> int:
    return (math.prod(shape) * dtype.itemsize + 63) // 64 * 64


class _Working:
    """Tensors to work in, one after the other in a piece of memory; or each by itself where none is given."""

    def __init__(self, segments: Segments, hidden: Tensor, asked: Asked, memory: Tensor | None) -> None:
        self._of: dict[str, Tensor] = {}
        at = 0
        for name, (shape, dtype) in _places(segments, hidden, asked).items():
            size = math.prod(shape) * dtype.itemsize
            if memory is None:
                self._of[name] = hidden.new_empty(math.prod(shape), dtype=dtype)
            else:
                self._of[name] = memory[at : at + size].view(dtype)
            at += _whole_lines(shape, dtype)

    def take(self, name: str, *shape: int) -> Tensor:
        """For a chunk's rows."""
        return self._of[name][: math.prod(shape)].view(shape)


class Head(ABC):
    """The products and sums of a device's part of the head, in one numerics mode. Logits float32 [r, v]."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, segments: Segments, asked: Asked) -> None:
        self.weight, self.dtype, self.segments, self.asked = weight, dtype, segments, asked

    @abstractmethod
    def logits(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def log_sum_exp(self, logits: Tensor) -> Tensor:
        """[r, segments here]"""

    @abstractmethod
    def join(self, parts: Tensor) -> Tensor:
        """Log-sum-exp [r, segments] of all segments -> [r]."""

    @abstractmethod
    def entropies(self, logits: Tensor, log_z: Tensor) -> Tensor:
        """[r, segments here]"""

    @abstractmethod
    def gradient(self, logits: Tensor, log_z: Tensor, targets: Tensor, token_weights: Tensor) -> Tensor:
        """Of the logits, before their soft cap, in the compute dtype."""

    @abstractmethod
    def d_hidden(self, d_logits: Tensor) -> Tensor:
        """float32 [r, D], the sum over the segments here."""

    @abstractmethod
    def add_weight_gradient(self, d_logits: Tensor, x: Tensor, sum: Tensor) -> None: ...

    @abstractmethod
    def total(self, losses: Tensor) -> Tensor:
        """The sum of [T, 1]."""


class _Contract(Head):
    """By the contract's kernels; the weight is packed once for all chunks."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, segments: Segments, asked: Asked, working: _Working) -> None:
        super().__init__(weight, dtype, segments, asked)
        self.raw, self.working, width = torch.ops.lockstep, working, weight.shape[1]
        columns = working.take("columns", panels(len(weight)), width, 16)
        self.columns = self.raw.pack_columns.out(weight, dtype, out=columns)
        own = contiguous_parts(weight, 0, segments.here) if asked.hidden_gradient else []
        places = [working.take(f"rows{i}", panels(width), len(part), 16) for i, part in enumerate(own)]
        self.rows = [self.raw.pack_rows.out(part, dtype, out=at) for part, at in zip(own, places, strict=True)]

    def logits(self, x: Tensor) -> Tensor:
        y = self.working.take("logits", len(x), len(self.weight))
        self.raw.gemm.out(x, self.columns, len(self.weight), None, torch.float32, out=y)
        return self.raw.softcap.out(y, self.asked.softcap, out=y) if self.asked.softcap else y

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        return self.raw.log_sum_exp(logits, self.segments.here)

    def join(self, parts: Tensor) -> Tensor:
        return self.raw.log_sum_exp(parts, 1)[:, 0]

    def entropies(self, logits: Tensor, log_z: Tensor) -> Tensor:
        return self.raw.entropies(logits, log_z, self.segments.here)

    def gradient(self, logits: Tensor, log_z: Tensor, targets: Tensor, token_weights: Tensor) -> Tensor:
        asked, first, d = self.asked, self.segments.first, self.working.take("d_logits", *logits.shape)
        factors = asked.z_loss, asked.softcap, first, self.dtype
        return self.raw.cross_entropy_backward.out(logits, log_z, targets, token_weights, *factors, out=d)

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        width, parts = (
            self.weight.shape[1],
            zip(contiguous_parts(d_logits, 1, self.segments.here), self.rows, strict=True),
        )
        return neighbour_sum([self.raw.gemm(d, rows, width, None, torch.float32) for d, rows in parts])

    def add_weight_gradient(self, d_logits: Tensor, x: Tensor, sum: Tensor) -> None:
        rows = self.working.take("x", panels(x.shape[1]), len(x), 16)
        self.raw.gemm_transposed_add(d_logits, self.raw.pack_rows.out(x, self.dtype, out=rows), sum)

    def total(self, losses: Tensor) -> Tensor:
        return self.raw.column_sums(losses)[0]


class _Plain(Head):
    """In plain PyTorch (``numerics: fast``)."""

    def logits(self, x: Tensor) -> Tensor:
        y, cap = (x @ self.weight.to(self.dtype).T).float(), self.asked.softcap
        return cap * torch.tanh(y / cap) if cap else y

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        return torch.stack([part.logsumexp(-1) for part in logits.tensor_split(self.segments.here, dim=1)], dim=1)

    def join(self, parts: Tensor) -> Tensor:
        return parts.logsumexp(-1)

    def entropies(self, logits: Tensor, log_z: Tensor) -> Tensor:
        terms = torch.special.entr((logits - log_z[:, None]).exp())
        return torch.stack([part.sum(-1) for part in terms.tensor_split(self.segments.here, dim=1)], dim=1)

    def gradient(self, logits: Tensor, log_z: Tensor, targets: Tensor, token_weights: Tensor) -> Tensor:
        asked, token = self.asked, targets - self.segments.first
        g = (logits - log_z[:, None]).exp() * (token_weights * (1 + 2 * asked.z_loss * log_z))[:, None]
        inside = ((token >= 0) & (token < self.segments.held))[:, None]
        at = token.clamp(0, self.segments.held - 1)[:, None]
        g.scatter_add_(1, at, torch.where(inside, -token_weights[:, None], 0.0))
        if asked.softcap:
            g = g * (1 - (logits / asked.softcap).square())
        return torch.where((targets < 0)[:, None], 0.0, g).to(self.dtype)

    def d_hidden(self, d_logits: Tensor) -> Tensor:
        return (d_logits @ self.weight.to(self.dtype)).float()

    def add_weight_gradient(self, d_logits: Tensor, x: Tensor, sum: Tensor) -> None:
        sum += d_logits.T @ x

    def total(self, losses: Tensor) -> Tensor:
        return losses.sum()
