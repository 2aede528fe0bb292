"""Capture: a function of tensors, forward and backward, as one graph of raw operators.

The function runs once over fake tensors (shapes without memory) under `make_fx`; autograd runs inside the trace, so
that the graph holds exactly the operators, in exactly the order, that running it eagerly would call. That is what
makes a compiled graph give the bits of the eager one.
"""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, fx

from lockstep.ops.row_share import RowShare

ALL_ROWS = RowShare()

Function = Callable[..., tuple[Tensor, ...]]
"""Of positional tensors, to a tuple of tensors."""


class CannotCompile(Exception):
    """A stage that cannot be made a program; the message says why. It runs operator by operator instead."""


class NotCached(CannotCompile):
    """A stage that would have to be captured, where only the cache was asked for."""


def not_possible(level: str, why: object) -> str:
    """The line that tells of a level which was asked for and is not what runs."""
    return f"compile.level {level} is not possible here, so operators run one by one (O0): {why}"


@dataclass(frozen=True)
class Given:
    """An input of a graph: a tensor of this shape and dtype, contiguous. differentiated: its gradient is an output.

    shape: a size may be `ROWS`, the number of rows (tokens) of the batch, `OWN`, this rank's share of them, or `ANY`,
    one that no shape in the graph depends on (the number of sequences).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiated: bool = False

    def fake(self, units: int, share: RowShare) -> Tensor:
        """An empty tensor for this many units of rows; under a FakeTensorMode it has no memory."""
        known = {ROWS: share.all_rows(units), OWN: share.own_rows(units), ANY: _SOME}
        sizes = [known.get(size, size) for size in self.shape]
        return torch.empty(sizes, dtype=self.dtype, requires_grad=self.differentiated)


ROWS, ANY, OWN = -1, -2, -3
_SOME = 5


@dataclass(frozen=True)
class Joint:
    """A captured graph: inputs, then the gradients that come in (tangents); results of the function, then the
    gradients of the differentiated inputs.

    outputs: how many results are the function's own. tangents: which of them have a gradient coming in.
    loose: the inputs with a size that no shape in the graph may depend on.
    """

    module: fx.GraphModule
    outputs: int
    tangents: tuple[int, ...]
    loose: tuple[int, ...]


TRACING = threading.RLock()
"""Tracing patches `torch.nn.Module` for the whole process, so one thread traces at a time. Others may run meanwhile:
what is patched looks at nothing but the trace's own modes, which belong to the tracing thread."""


@lru_cache
def import_tracer() -> None:
    """Import what traces, by tracing something: once in a process, and longer than any capture takes. A process that
    serves is without the meta kernels until now."""
    importlib.import_module("torch._meta_registrations")
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    with FakeTensorMode():
        make_fx(torch.neg)(torch.empty(1))


def capture(
    function: Function, given: Sequence[Given], units: int, whole: bool = False, share: RowShare = ALL_ROWS
) -> Joint:
    """Trace a function for a number of rows (so many units of the share); its backward too where an input is
    differentiated.

    whole: the gradients that come in are ones, made within the graph. Raises whatever the function does with a
    tensor's values (`item`, shapes that depend on data): it cannot be captured. Threads may call it at once.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    loose = tuple(i for i, one in enumerate(given) if ANY in one.shape)
    wanted = [i for i, one in enumerate(given) if one.differentiated]
    outputs, tangents = 0, tuple[int, ...]()

    def joint(*tensors: Tensor) -> tuple[Tensor | None, ...]:
        nonlocal outputs, tangents
        results = function(*tensors)
        outputs = len(results)
        if not wanted:
            return results
        tangents = tuple(i for i, out in enumerate(results) if out.requires_grad)
        ends = [results[i] for i in tangents]
        gradients = [torch.ones_like(results[i]) if whole else _coming_in(results[i], i) for i in tangents]
        starts = [tensors[i] for i in wanted]
        return (*results, *torch.autograd.grad(ends, starts, gradients, allow_unused=True))

    with TRACING, FakeTensorMode(), torch.set_grad_enabled(bool(wanted)):
        module = make_fx(joint)(*(one.fake(units, share) for one in given))
    tangents = () if whole else tangents
    _inputs_first(module.graph)
    names = [one.name for one in given] + [f"gradient of result {i}" for i in tangents]
    for node, name in zip(module.graph.find_nodes(op="placeholder"), names, strict=True):
        node.meta["given"] = name
    return Joint(module, outputs, tangents, loose)


def _coming_in(result: Tensor, number: int) -> Tensor:
    """The gradient of a result, as one more input of the graph that is being traced: only now is it known what it is
    like, and to run the function before only to learn that takes a seventh of all compiling."""
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, track_tensor_tree

    with disable_proxy_modes_tracing() as mode:
        gradient = torch.empty_like(result, requires_grad=False)
        proxy = mode.tracer.create_proxy("placeholder", f"gradient_{number}", (), {})
        return track_tensor_tree(gradient, proxy, constant=None, tracer=mode.tracer)


def _inputs_first(graph: fx.Graph) -> None:
    """Inputs that were met on the way go to the others, in their order."""
    for one, after in itertools.pairwise(graph.find_nodes(op="placeholder")):
        if one.next is not after:
            one.append(after)
