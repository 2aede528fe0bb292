"""Runs a scheduler's step on the model: the only part of the engine, with its pages, that touches tensors."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from lockstep.config.pages import page_dtype, page_size
from lockstep.model.pages import Make, make_pages
from lockstep.ops import Paged, Pages
from lockstep.serve.inputs import Inputs
from lockstep.serve.scheduler import Step

if TYPE_CHECKING:
    from lockstep.model import Model
    from lockstep.serve.tp.share import Share

log = logging.getLogger("lockstep.serve")
Level = Literal["O0", "O2"]
Tell = Callable[[Tensor, Paged, Tensor], AbstractContextManager[None]]
"""(tokens, batch, rows) -> within, the other ranks do the same pass"""


def pages_dtype(model: Model, kv_dtype: Literal["auto", "int8"]) -> torch.dtype:
    """What keys and values are kept in: see `page_dtype`."""
    kept: torch.dtype = getattr(torch, page_dtype(model.config, model.ops.numerics, name_of(model.dtype), kv_dtype))
    return kept


def page_bytes(model: Model, dtype: torch.dtype | None = None) -> int:
    """Bytes of one page over all layers. dtype: what `Runner` takes."""
    return page_size(model.config, model.ops.numerics, name_of(dtype or model.dtype))


def name_of(dtype: torch.dtype) -> str:
    """`bfloat16` for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def _pages(model: Model, count: int, dtype: torch.dtype | None, make: Make) -> list[Pages]:
    return make_pages(model.config, model.ops.numerics, count, dtype or model.dtype, make)


class Runner:
    """A model with `pages` pages of keys and values per layer."""

    def __init__(
        self,
        model: Model,
        pages: int,
        dtype: torch.dtype | None,
        rows: int,
        level: Level = "O2",
        share: Share | None = None,
        tell: Tell | None = None,
    ) -> None:
        """dtype: of the pages, None: the model's; int8 with `numerics: fast`. rows: the most tokens of a step.

        level: O2 runs a step as one compiled program, O0 operator by operator; the bits are the same. share: of one of
        several ranks. tell: how the first of them lets the others join in a pass.
        """
        self.model, self._share, self._tell = model, share, tell
        self._inputs = Inputs()
        self.prepare()
        self._cache = _pages(model, pages, dtype, _zeros)
        self._forward = self._compiled(rows) if level == "O2" and model.ops.numerics == "bitwise" else self._eager

    def prepare(self) -> None:
        """Pack the weights, where they are not packed yet."""
        self.model.decoder.prepare(self.model.ops, self.model.dtype)

    def run(self, step: Step, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Write the step's keys and values, on all ranks where there are some; what `compute` gives for these rows of
        the packed step."""
        tokens, batch = self._inputs.fill(step)
        if self._tell is None:
            wanted = None if len(rows) == len(tokens) else torch.tensor(rows, dtype=torch.int64)
            return self.compute(tokens, batch, wanted)
        wanted = torch.tensor(rows, dtype=torch.int64)
        with self._tell(tokens, batch, wanted):
            return self.compute(tokens, batch, wanted)

    def compute(self, tokens: Tensor, batch: Paged, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """tokens int64 [T], rows int64 [R] (None: all) -> hidden [T, D] after the final norm, logits float32 [R, V] of
        the rows. The next step may write over them."""
        recorded = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # of PyTorch's context managers one takes 90 us between two steps
        try:
            hidden = self._forward(tokens, batch)
            if rows is not None and not len(rows):
                return hidden, torch.empty(0, self.model.config.vocab_size)
            return hidden, self._head(hidden if rows is None or len(rows) == len(tokens) else hidden[rows])
        finally:
            torch._C._set_grad_enabled(recorded)

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.decoder.head(self.model.ops, hidden)
        return logits

    @torch.inference_mode()
    def _eager(self, tokens: Tensor, batch: Paged) -> Tensor:
        model = self.model
        hidden: Tensor = model.decoder(model.ops, tokens, batch, self._cache, model.dtype)
        return hidden

    def _compiled(self, rows: int) -> Callable[[Tensor, Paged], Tensor]:
        """The program of a step, from the compile cache where it is there; what cannot be compiled runs eagerly."""
        from lockstep.compile import Cache, CannotCompile, Compiler, ServingProgram

        model = self.model
        if self._share is not None and self._share.captured is None:
            log.info("operators run one by one (O0): what is gathered from several processes is not compiled")
            return self._eager
        compiler = Compiler("O2", cache=Cache(), note=log.info)
        try:
            captured, groups = (None, None) if self._share is None else (self._share.captured, self._share.groups)
            return ServingProgram(
                model.decoder, model.ops, self._cache, model.dtype, compiler, rows, captured, groups
            )  # fmt: skip
        except CannotCompile as error:
            log.info("operators run one by one (O0), a step cannot be compiled: %s", error)
            return self._eager

    @torch.inference_mode()
    def logprobs(self, logits: Tensor) -> Tensor:
        """The raw distribution's log-probabilities, float32 [R, V]: the bits of `Model.logprobs`."""
        return self.model.ops.log_softmax(logits)

    @torch.inference_mode()
    def select_logprobs(self, logits: Tensor, tokens: list[int]) -> Tensor:
        """Of each row, the log-probability of its token: float32 [R], the bits of `logprobs`."""
        return self.model.ops.select_logprobs(logits, torch.tensor(tokens, dtype=torch.int64))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only once they are written: the system maps a page at its first use."""
    count = int(np.prod(shape))
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)
