"""Level O1 of one process: the decoder with its blocks as programs (`block_calls`).

What is around the blocks (embedding, final norm, loss) runs operator by operator, and autograd joins the blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.compile.block_calls import BlockCalls
from lockstep.compile.capture import CannotCompile, not_possible
from lockstep.compile.compiler import Compiler
from lockstep.compile.describe import Unchanged
from lockstep.compile.program import Placer
from lockstep.memory.layers import recomputing
from lockstep.model.decoder import BlockCall, Decoder
from lockstep.model.moe import Routed
from lockstep.ops import Operators, Packed


class Blockwise:
    """A decoder whose blocks run as programs when gradients are recorded. Called as the decoder is."""

    def __init__(self, decoder: Decoder, ops: Operators, dtype: torch.dtype, compiler: Compiler, rows: int) -> None:
        """rows: the most tokens of a batch. Compiles at once; CannotCompile where that is not possible."""
        self.decoder, self.ops, self.dtype, self.compiler, self.rows = decoder, ops, dtype, compiler, rows
        self._call: BlockCall
        self._compile()

    def __call__(self, tokens: Tensor, batch: Packed, routed: list[Routed] | None = None) -> Tensor:
        """tokens int [T] -> hidden [T, D] after the final norm, with the graph that autograd needs. routed: takes what
        the router of each layer did, where the model has a load-balance loss."""
        decoder = self.decoder
        if not self._unchanged:
            self._compile_again()
        x, layers = decoder.start(self.ops, tokens, self.dtype), range(len(decoder.layers))
        tables = decoder.rope_tables(batch)
        x = decoder.blocks(self.ops, x, batch, tables, layers, None, self.dtype, self._call, routed)
        return decoder.norm(self.ops, x, self.dtype)

    def _compile_again(self) -> None:
        self.compiler.note("the model was changed after it was compiled: compiling again")
        try:
            self._compile()
        except CannotCompile as error:
            self.compiler.note(not_possible("O1", error))
            self._call, self._unchanged = recomputing(()), Unchanged(self.decoder, hooks=False)

    def _compile(self) -> None:
        self._call = BlockCalls(
            self.decoder, self.ops, self.dtype, [range(len(self.decoder.layers))], (), None, self.compiler,
            Placer(self.rows), {}, recomputing(()), bool(self.decoder.config.router_aux_loss),
        )  # fmt: skip
        self._unchanged = Unchanged(self.decoder)
