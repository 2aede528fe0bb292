"""Where two runs part: the outputs of every operator, in order, with the module that asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.ops import Operators

_NOT_COMPUTED = ("numerics", "pack", "write_kv", "write_latents")
_OTHER_ROWS = (
    "linear_cross_entropy", "route", "dispatch", "grouped_linear", "grouped_gated", "balance_loss",
)  # fmt: skip
"""Operators whose rows are not those of the tokens of a batch."""
_MODULES_OF_OTHER_ROWS = (".experts",)
"""Modules that compute rows of experts: what goes wrong in them is seen at the operator after."""
_SAME_OPERATOR = {"paged_attention": "attention", "latent_attention": "attention"}


@dataclass(frozen=True)
class Place:
    """An operator's call: the module it belongs to (`layers.3.attn.q`) and its name (`linear`)."""

    module: str
    operator: str


@dataclass
class Trace:
    """Outputs of the calls at each place, in the order of the calls; rows belong to the tokens of the batch."""

    outputs: list[tuple[Place, Tensor]]

    def rows(self, pick: Callable[[Tensor], Tensor]) -> list[tuple[Place, Tensor]]:
        return [(place, pick(output)) for place, output in self.outputs]


@contextmanager
def traced(decoder: nn.Module, ops: Operators) -> Iterator[tuple[Operators, Trace]]:
    """Operators that record what they give, and the record. Hooks on the decoder tell which module asks."""
    trace, asking = Trace([]), [""]
    hooks = [hook for name, module in decoder.named_modules() if name for hook in _follow(module, name, asking)]
    try:
        yield _recording(ops, trace, asking), trace
    finally:
        for hook in hooks:
            hook.remove()


def first_difference(one: list[tuple[Place, Tensor]], other: list[tuple[Place, Tensor]]) -> Place | None:
    """The first place whose rows differ as raw bytes; None when all are equal."""
    for (place, a), (_, b) in zip(one, other, strict=True):
        if differing(a, b):
            return place
    return None


def differing(a: Tensor, b: Tensor) -> int:
    """How many elements of two tensors of one shape and type differ as raw bytes."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"{tuple(a.shape)} of {a.dtype} cannot be compared with {tuple(b.shape)} of {b.dtype}")
    integer = torch.int32 if a.element_size() == 4 else torch.int16
    return int((a.contiguous().view(integer) != b.contiguous().view(integer)).sum())


def _follow(module: nn.Module, name: str, asking: list[str]) -> tuple[Any, Any]:
    def enter(*_: Any) -> None:
        asking.append(name)

    def leave(*_: Any) -> None:
        asking.pop()

    return module.register_forward_pre_hook(enter), module.register_forward_hook(leave)


def _recording(ops: Operators, trace: Trace, asking: list[str]) -> Operators:
    def record(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = call(*args, **kwargs)
            if asking[-1].endswith(_MODULES_OF_OTHER_ROWS):
                return output
            place = Place(asking[-1] or "head", _SAME_OPERATOR.get(name, name))
            trace.outputs.append((place, output.detach().clone()))
            return output

        return run

    # What has a default says how operators are cut among devices; it is none itself.
    given = [f.name for f in fields(ops) if f.default is MISSING and f.default_factory is MISSING]
    names = [name for name in given if name not in _NOT_COMPUTED + _OTHER_ROWS]
    recorders: dict[str, Any] = {name: record(name, getattr(ops, name)) for name in names}
    return replace(ops, **recorders)
