"""The forward pass of a path at its compile level: operator by operator, block by block, or as one program."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lockstep.compile import Blockwise, Cache, Compiler, ServingProgram
from lockstep.model import Model
from lockstep.ops import Operators, Packed, Paged, Pages

Forward = Callable[[Tensor, Packed | Paged], Tensor]
"""(tokens int64 [T], their batch) -> hidden [T, D] after the final norm"""
log = logging.getLogger("lockstep.serve")


class Levels:
    """The compilers of a proof's paths: what one path has compiled the next one finds."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._compilers = {"O1": _compiler("O1"), "O2": _compiler("O2")}

    def forward(self, ops: Operators, level: str, cache: Sequence[Pages] | None, rows: int) -> Forward:
        """rows: the most tokens of a pass. CannotCompile where a level is not possible."""
        decoder, dtype = self.model.decoder, self.model.dtype
        if level == "O0":
            return lambda tokens, batch: decoder(ops, tokens, batch, cache, dtype)
        compiler = self._compilers[level]
        if cache is not None:
            return ServingProgram(decoder, ops, cache, dtype, compiler, rows)  # type: ignore[return-value]
        blocks = Blockwise(decoder, ops, dtype, compiler, rows)

        def trained(tokens: Tensor, batch: Packed | Paged) -> Tensor:
            with torch.enable_grad():  # the blocks' training programs
                return blocks(tokens, batch).detach()  # type: ignore[arg-type]

        return trained


def _compiler(level: str) -> Compiler:
    return Compiler(level, cache=Cache(), note=log.info)  # type: ignore[arg-type]
