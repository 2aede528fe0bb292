"""Serving: the forward pass over pages of keys and values as one program, for prefill and decode alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.compile.capture import CannotCompile
from lockstep.compile.compiler import Compiler
from lockstep.compile.describe import SameWeights, Unchanged, refuse_hooks
from lockstep.compile.layers import compiled_layers
from lockstep.compile.program import Placer, Program
from lockstep.compile.stage import embedding_stage, norm_stage, tensors_of
from lockstep.model.decoder import Decoder
from lockstep.ops import Operators, Paged, Pages

if TYPE_CHECKING:
    from lockstep.parallel.nodes import Group


class ServingProgram:
    """A decoder's forward pass over paged sequences: up to `rows` new tokens, of any number of sequences.

    One program serves every step, whatever its numbers of tokens, sequences and pages: what a step brings is bound,
    nothing is padded or copied. The weights must be prepared (`Decoder.prepare`).
    """

    def __init__(
        self,
        decoder: Decoder,
        ops: Operators,
        cache: Sequence[Pages],
        dtype: torch.dtype,
        compiler: Compiler,
        rows: int,
        captured: Operators | None = None,
        groups: Mapping[str, Group] | None = None,
    ) -> None:
        """Compiles at once; CannotCompile where that is not possible. cache: the pages of every layer. captured: the
        operators as a graph has them, where sums reach across ranks. groups: those ranks, by axis."""
        refuse_hooks(decoder)
        self._captured, self._groups = captured or ops, groups
        self.decoder, self.ops, self.cache, self.dtype, self.rows = decoder, ops, list(cache), dtype, rows
        self._compiler, self._refused = compiler, False
        self._result: Tensor | None = None
        """Where the last call's hidden states lie: the program's memory, seen at the number of its rows."""
        self._given: tuple[Tensor | None, Paged | None] = None, None
        """What is bound: tensors that come again, with other numbers in them, need not be bound again."""
        self._compile()

    def __call__(self, tokens: Tensor, batch: Paged) -> Tensor:
        """tokens int64 [T] -> hidden [T, D] after the final norm, the bits of the decoder's; overwritten by the next
        call. More tokens than planned run operator by operator. Weights that are written are noticed at once, another
        change of the model at the next step that comes with tensors of its own."""
        new = tokens is not self._given[0] or batch is not self._given[1]
        if not self._same_weights:
            self._again("the weights were changed after the model was compiled")
        elif new and not self._unchanged:
            self._again("the model was changed after it was compiled")
        if self._refused or len(tokens) > self.rows:
            hidden: Tensor = self.decoder(self.ops, tokens, batch, self.cache, self.dtype)
            return hidden
        if new or self._given[0] is None:
            self.program.bind(self._bound, [tokens, *tensors_of(batch), *self.decoder.rope_tables(batch)])
            self._given = tokens, batch
            if self._result is not None and len(self._result) != len(tokens):
                self._result = None
        if self._result is None:
            self.program.resize(len(tokens))
        self.program.run()
        if self._result is None:
            self._result = self.program.value(self._hidden)
        return self._result

    def _again(self, why: str) -> None:
        """Compile what the model has become; where that is not possible, run it operator by operator from now on."""
        self._compiler.note(f"{why}: compiling again")
        try:
            refuse_hooks(self.decoder)
            with torch.inference_mode(False):  # what traces counts the versions of tensors
                self._compile()
            self._refused = False
        except CannotCompile as error:
            self._refused = True
            self._compiler.note(f"operators run one by one (O0), a step cannot be compiled: {error}")
            self._watch()

    def _watch(self) -> None:
        self._same_weights, self._unchanged = (
            SameWeights(self.decoder),
            Unchanged(self.decoder, hooks=not self._refused),
        )

    def _compile(self) -> None:
        decoder, compiler, one = self.decoder, self._compiler, torch.zeros(1, dtype=torch.int32)
        decoder.prepare(self.ops, self.dtype)
        batch = Paged(one, torch.tensor([0, 1], dtype=torch.int32), one[None])
        with torch.no_grad():
            layers = compiled_layers(decoder, self._captured, batch, self.cache, self.dtype, compiler)
            first = compiler.compile(embedding_stage(decoder, self._captured, self.dtype)).forward
            last = compiler.compile(norm_stage(decoder, self._captured, self.dtype)).forward
        with compiler.phase("build"):
            program, placer, empty = Program(groups=self._groups), Placer(self.rows), torch.empty(0)
            recipes = [first, *(layer.halves.forward for layer in layers), last]
            scratch = program.memory(max(placer(recipe).scratch for recipe in recipes))
            (stream,), (hidden,) = first.outputs, last.outputs
            x = [program.place(program.memory(stream.bytes(self.rows)), 0, stream) for _ in range(2)]
            tokens, tables = program.tensor(empty), [program.tensor(empty) for _ in range(2)]
            parts = [program.tensor(empty) for _ in tensors_of(batch)]
            program.append(placer(first), [tokens, program.tensor(decoder.embed.weight), x[0]], scratch)
            for i, layer in enumerate(layers):
                pages = [program.tensor(t) for t in tensors_of(self.cache[i])]
                weights = [program.tensor(leaf.tensor) for leaf in layer.leaves]
                inputs = [x[i % 2], *parts, tables[layer.slides], *pages, *weights]
                program.append(placer(layer.halves.forward), [*inputs, x[(i + 1) % 2]], scratch)
            self._hidden = program.place(program.memory(hidden.bytes(self.rows)), 0, hidden)
            inputs = [x[len(layers) % 2], program.tensor(decoder.norm.weight), self._hidden]
            program.append(placer(last), inputs, scratch)
        self.program, self._bound = program, [tokens, *parts, *tables]
        self._result, self._given = None, (None, None)
        self._watch()
