"""Any function of tensors, without gradient, sunk into a program: one call from Python instead of one per operator."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lockstep.compile.capture import Given
from lockstep.compile.compiler import Compiler
from lockstep.compile.program import Placer, Program
from lockstep.compile.stage import Stage


def sink(
    function: Callable[..., tuple[Tensor, ...]], *examples: Tensor, compiler: Compiler | None = None
) -> Callable[..., tuple[Tensor, ...]]:
    """The function for inputs of the examples' shapes and dtypes, as a program with static memory.

    The results are overwritten by the next call; the bits are those of calling the function. Raises CannotCompile
    for a function that looks at values. A given compiler's cache is not used: a function has no name to keep it by.
    """
    maker = compiler or Compiler("O2")
    given = tuple(Given(f"x{i}", tuple(x.shape), x.dtype) for i, x in enumerate(examples))
    recipe = maker.capture(Stage("function", [], given, lambda: function)).forward
    program, placed = Program(), Placer(1)(recipe)
    inputs = [program.tensor(x) for x in examples]
    memory = program.memory(placed.scratch)
    results = [program.place(program.memory(one.bytes(1)), 0, one) for one in recipe.outputs]
    program.append(placed, [*inputs, *results], memory)
    outputs = [program.value(one) for one in results]
    found = tuple(outputs[at] for at in recipe.gives if at is not None)

    def run(*tensors: Tensor) -> tuple[Tensor, ...]:
        for tensor, example in zip(tensors, given, strict=True):
            if tuple(tensor.shape) != example.shape or tensor.dtype != example.dtype or not tensor.is_contiguous():
                raise ValueError(f"{example.name}: expected a contiguous {example.dtype} {example.shape}")
        program.run(inputs, tensors)
        return found

    return run
