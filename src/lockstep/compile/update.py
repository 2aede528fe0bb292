"""Level O2: the global gradient norm and the optimizer's update as programs.

Both have one call per parameter and no memory worth planning. The norm is needed on the host (it decides whether the
step counts, and how the gradient is clipped), which is why the step's end is two programs and not one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple

import torch
from torch import Tensor

from lockstep.compile.capture import Function, Given
from lockstep.compile.compiler import Compiler
from lockstep.compile.program import Placer, Program
from lockstep.compile.recipe import Place
from lockstep.compile.stage import Stage
from lockstep.ops import AdamWFactors, Operators
from lockstep.ops.tree import tree_sum


class GlobalNorm:
    """The root of the sum of squares of float32 tensors of these shapes, in their order, by the fixed tree."""

    def __init__(self, shapes: Sequence[torch.Size], ops: Operators, compiler: Compiler) -> None:
        kinds = {shape: compiler.compile(_squares(ops, shape)).forward for shape in dict.fromkeys(shapes)}
        squares = [kinds[shape] for shape in shapes]
        root = compiler.compile(_root(len(shapes))).forward
        with compiler.phase("build"):
            self._program, placer = Program(), Placer(1)
            self._gradients = list(self._program.tensors([torch.empty(0)] * len(shapes)))
            sums = self._program.memory(8 * len(shapes))
            scratch = self._program.memory(max(placer(recipe).scratch for recipe in [*squares, root]))
            one, every = Place("sum", "float64", ()), Place("sums", "float64", ((len(shapes), 0),))
            for i, (recipe, gradient) in enumerate(zip(squares, self._gradients, strict=True)):
                self._program.append(placer(recipe), [gradient, self._program.place(sums, 8 * i, one)], scratch)
            self._norm = self._program.tensor(torch.empty((), dtype=torch.float64))
            self._program.append(placer(root), [self._program.place(sums, 0, every), self._norm], scratch)

    def __call__(self, gradients: Sequence[Tensor]) -> float:
        """The norm. NaN or infinite if any element is."""
        self._program.run(self._gradients, [gradient.contiguous() for gradient in gradients])
        return float(self._program.value(self._norm))


class Update:
    """AdamW over parameters and their moments, in place; `decayed` says which have weight decay."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        first: Mapping[str, Tensor],
        second: Mapping[str, Tensor],
        decayed: Sequence[bool],
    ) -> None:
        self._parameters, self._program = list(parameters.values()), Program()
        count = len(AdamWFactors.__dataclass_fields__)
        self._factors = [[self._program.constant("f0x0p0") for _ in range(count)] for _ in range(2)]
        self._gradients = []
        empty = torch.empty(0)
        tensors = self._program.tensors(
            tensor for name, p in parameters.items() for tensor in (p, empty, first[name], second[name])
        )
        for i, with_decay in enumerate(decayed):
            values = tensors[4 * i : 4 * i + 4]
            self._gradients.append(values[1])
            self._program.call("lockstep::adamw", *values, *self._factors[with_decay])

    def __call__(self, gradients: Sequence[Tensor], plain: AdamWFactors, decayed: AdamWFactors) -> None:
        """One update by these gradients, in the order of the parameters."""
        values = [value for group in self._factors for value in group]
        self._program.set_floats(values, [*astuple(plain), *astuple(decayed)])
        self._program.run(self._gradients, [gradient.contiguous() for gradient in gradients])
        torch.autograd.graph.increment_version(self._parameters)  # caches of the weights must see it


def _squares(ops: Operators, shape: torch.Size) -> Stage:
    given = (Given("gradient", tuple(shape), torch.float32),)
    function: Function = lambda gradient: (ops.square_sum(gradient),)  # noqa: E731
    name = f"squares {'x'.join(map(str, shape))}"
    return Stage(name, ["norm", "squares", ops.numerics, list(shape)], given, lambda: function)


def _root(count: int) -> Stage:
    given = (Given("sums", (count,), torch.float64),)
    function: Function = lambda sums: (tree_sum(sums).sqrt(),)  # noqa: E731
    return Stage("gradient norm", ["norm", "root", count], given, lambda: function)
