"""Weights sharded over data-parallel ranks: each keeps its runs, and a layer's whole weights exist while it computes.

ZeRO (arXiv 1910.02054) level 3. A unit is what is gathered at once: a layer, the embedding, or the final norm and the
output projection. Values are copied only, so the bits are those of whole weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.model.decoder import BlockCall
from lockstep.parallel.boundary import passed
from lockstep.parallel.shards import Run, Shards, unit_of


class WeightStore:
    """The runs of this rank, and the parameters that a model computes with, which are hollow unless their unit is open.

    All data-parallel ranks of a place in the mesh must open the same units in the same order.
    """

    def __init__(self, shards: Shards) -> None:
        self.shards = shards
        self.own: dict[Run, Tensor] = {}
        """Float32 [n] each: what is trained."""
        self._parameters: dict[str, dict[str, nn.Parameter]] = {}
        self._parts: dict[str, Shards] = {}
        self._open: Counter[str] = Counter()
        self._begun: dict[str, tuple[dict[str, Tensor], Callable[[], None]]] = {}
        """Units on their way: their tensors, and what waits for them."""

    def __contains__(self, name: str) -> bool:
        return name in self._parameters.get(unit_of(name), {})

    def take(self, name: str, parameter: nn.Parameter) -> None:
        """Keep this rank's runs of a parameter, which is hollow from then on."""
        unit = unit_of(name)
        self._parameters.setdefault(unit, {})[name] = parameter
        self._parts[unit] = self.shards.part(self._parameters[unit])
        self.set(name, parameter.detach())
        _hollow(parameter)

    @torch.no_grad()
    def set(self, name: str, whole: Tensor) -> None:
        """Give the own runs of a parameter their values."""
        for run in self.shards.part([name]).own:
            values = self.shards.read({name: whole}, run)
            if run in self.own:
                self.own[run].copy_(values)
            else:
                self.own[run] = values.clone()

    @torch.no_grad()
    def whole(self, name: str) -> Tensor:
        """A parameter's whole value. Every rank of the axis must call it."""
        shape = self._parameters[unit_of(name)][name].shape
        found, end = self._gather(self.shards.part([name]), {name: shape})
        end()
        return found[name]

    @torch.no_grad()
    def begin(self, unit: str) -> None:
        """Begin to gather a unit that is opened soon: what runs until then hides it."""
        if unit in self._parts and unit not in self._begun and not self._open[unit]:
            shapes = {name: p.shape for name, p in self._parameters[unit].items()}
            self._begun[unit] = self._gather(self._parts[unit], shapes)

    @torch.no_grad()
    def open(self, unit: str) -> None:
        """Gather a unit, unless it is here already: who opens it closes it."""
        self.begin(unit)
        self._open[unit] += 1
        if self._open[unit] == 1 and unit in self._parts:
            found, end = self._begun.pop(unit)
            end()
            for name, parameter in self._parameters[unit].items():
                parameter.data = found[name]

    def close(self, unit: str) -> None:
        self._open[unit] -= 1
        if not self._open[unit]:
            for parameter in self._parameters.get(unit, {}).values():
                _hollow(parameter)

    @contextmanager
    def held(self, units: Iterable[str]) -> Iterator[None]:
        """Units that are open in between."""
        units = list(units)
        for unit in units:
            self.open(unit)
        yield
        for unit in units:
            self.close(unit)

    def calling(self, call: BlockCall) -> BlockCall:
        """Blocks called as by `call`, their weights gathered for the forward, and again for the backward."""

        def wrapped(layer: int, block: nn.Module, ops: Any, x: Tensor, *rest: Any) -> Tensor:
            unit = f"layers.{layer}"
            opens, closes = (lambda: self.open(unit)), (lambda: self.close(unit))
            with self.held([unit]):
                y = call(layer, block, ops, passed(x, closes), *rest)
            return passed(y, opens)

        return wrapped

    def _gather(self, part: Shards, shapes: Mapping[str, torch.Size]) -> tuple[dict[str, Tensor], Callable[[], None]]:
        """Tensors that are whole when what is returned with them was called."""
        like = next(iter(self.own.values()), torch.empty(0))
        whole = {name: like.new_empty(shape) for name, shape in shapes.items()}
        for run in part.own:
            part.write(whole, run, self.own[run])
        return whole, part.begin_collect(whole)


def _hollow(parameter: nn.Parameter) -> None:
    """Take a parameter's memory away and leave its shape: whoever still needs the values holds them, as autograd does
    with what it saved, so nothing can be read that is gone."""
    parameter.data = parameter.data.new_empty(1).expand(parameter.shape)
