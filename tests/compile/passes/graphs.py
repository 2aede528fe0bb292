"""Graphs for the tests of passes: captured from functions or drawn at random, and run on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from lockstep.compile.passes import Changes, Pass, PassContext, apply


def capture(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """The graph of raw operators of a function, with fake values in its nodes."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    module = make_fx(function)(*[mode.from_tensor(x) for x in inputs])
    return module


def run(module: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    """All results, then the inputs after the run: what a graph writes into them counts too."""
    own = [x.clone() for x in inputs]
    with torch.no_grad():
        found = module(*own)
    return [*(found if isinstance(found, (tuple, list)) else [found]), *own]


def raw(x: Tensor) -> bytes:
    return x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    """Equal dtypes, shapes and bytes, one by one."""
    pairs = zip(before, after, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b) for a, b in pairs)


def check(step: Pass, module: fx.GraphModule, inputs: Sequence[Tensor], **context: Any) -> Changes:
    """Run a pass; the results must keep their bytes, and their memory must stay as separate as it was."""
    expected, apart = run(module, inputs), _apart(module, inputs)
    (report,) = apply(module, [step], PassContext(**context))
    assert same(expected, run(module, inputs))
    assert apart <= _apart(module, inputs), "two results share memory that did not before"
    return Changes(report.changed, report.notes)


def targets(module: fx.GraphModule) -> list[str]:
    """The operators of a graph in order, by their short names."""
    return [str(n.target).rpartition("aten.")[2] for n in module.graph.nodes if n.op == "call_function"]


def _apart(module: fx.GraphModule, inputs: Sequence[Tensor]) -> set[tuple[int, int]]:
    """Pairs of results and inputs that lie in different memory."""
    places = [x.untyped_storage().data_ptr() for x in run_sharing(module, inputs)]
    return {(i, j) for i in range(len(places)) for j in range(i) if places[i] != places[j]}


def run_sharing(module: fx.GraphModule, inputs: Sequence[Tensor]) -> list[Tensor]:
    own = [x.clone() for x in inputs]
    found = module(*own)
    return [*(found if isinstance(found, (tuple, list)) else [found]), *own]


_UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.neg, torch.exp, torch.sigmoid, lambda x: x * 2.0, lambda x: x + 1, lambda x: x * -0.0, lambda x: x.t(),
    lambda x: x.reshape(-1).view(4, 4), lambda x: x[:2].repeat(2, 1), lambda x: x.to(torch.bfloat16).float(),
    lambda x: x.unsqueeze(0).squeeze(0), lambda x: x.detach(), lambda x: x.contiguous(), lambda x: x[0:4],
    lambda x: x + torch.zeros(4, 4), lambda x: x * torch.full((4, 4), 3.0), lambda x: x.split(2)[1].repeat(2, 1),
    lambda x: x.max(dim=0)[0].expand(4, 4), lambda x: x.reshape(2, 8).reshape(4, 4),
]  # fmt: skip
_BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [torch.add, torch.mul, torch.sub, torch.maximum, torch.mm]
_WRITE: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda x, y: x.add_(y), lambda x, y: x.view(16)[:4].copy_(y[0]), lambda x, y: x.t()[0].mul_(y[1]),
]  # fmt: skip


@st.composite
def programs(draw: st.DrawFn, writes: bool = False) -> Callable[..., tuple[Tensor, ...]]:
    """A random function of two [4, 4] tensors. writes: it may write into inputs, views and its own values."""
    steps = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["unary", "binary", "write"] if writes else ["unary", "binary"]))
        table = {"unary": _UNARY, "binary": _BINARY, "write": _WRITE}[kind]
        steps.append((kind, draw(st.integers(0, len(table) - 1)), draw(st.integers(0, 99)), draw(st.integers(0, 99))))
    results = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))

    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        values = [a, b]
        for kind, which, i, j in steps:
            x, y = values[i % len(values)], values[j % len(values)]
            if kind == "unary":
                values.append(_UNARY[which](x))
            elif kind == "binary":
                values.append(_BINARY[which](x, y))
            elif _own(x):
                _WRITE[which](x, y.clone())
        return tuple(values[i % len(values)] for i in results)

    return program


def _own(x: Tensor) -> bool:
    """Whether a tensor may be written as [4, 4]: laid out row by row, no element twice."""
    return x.is_contiguous() and x.untyped_storage().nbytes() >= 64


def example_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 4, generator=generator), torch.randn(4, 4, generator=generator)]
