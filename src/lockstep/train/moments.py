"""The optimizer of a mesh's rank: over whole parameters, or over the runs of them that it owns."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from lockstep.config.train import OptimizerConfig
from lockstep.model import Model
from lockstep.parallel.shards import Run, Shards
from lockstep.parallel.weight_store import WeightStore
from lockstep.train.optimizer import AdamW

Step = Callable[[list[Tensor]], None]
"""The optimizer's update, by the gradients of its parameters."""


class Moments:
    """The optimizer over this rank's parameters: whole on every replica, or each replica's runs (ZeRO-1 and on).

    ZeRO (arXiv 1910.02054) level 1: a replica updates the runs that it owns and sends them to the others. Level 3: it
    keeps them (store).
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shards: Shards,
        config: OptimizerConfig,
        model: Model,
        level: int,
        store: WeightStore | None = None,
    ) -> None:
        self.parameters, self.shards, self.sharded = dict(parameters), shards, level > 0 and shards.shared
        self.store = store
        self.own: Mapping[str, Tensor] = self.parameters
        if store is not None:
            self.own = self._keyed(store.own)
        elif self.sharded:
            self.own = self._own(self.parameters)
        self.optimizer = AdamW(self.own, config, model.ops)

    def update(self, gradient: dict[str, Tensor], step: Step) -> None:
        """One step where nothing is sharded. gradient: whole-size tensors of which the own runs are valid."""
        self.shards.collect(gradient)
        step(list(gradient.values()))

    def update_runs(self, gradient: Mapping[Run, Tensor], step: Step) -> None:
        """One step where something is. gradient: the own runs."""
        found = self._keyed(gradient)
        step([found[name] for name in self.own])
        if self.store is not None:
            return
        for run in self.shards.own:  # where a run is a view of its parameter it is there already
            self.shards.write(self.parameters, run, self.own[_key(run)].view(-1))
        self.shards.collect(self.parameters)
        for parameter in self.parameters.values():
            torch.autograd.graph.increment_version(parameter)

    def local(self, kind: str, name: str) -> Tensor:
        """The first or second moments of one of this rank's parameters, whole; sharded, all replicas must ask."""
        moments = self.optimizer.first if kind == "first" else self.optimizer.second
        if not self.sharded:
            return moments[name]
        part, whole = self.shards.part([name]), {name: torch.zeros(self.parameters[name].shape)}
        for run in part.own:
            part.write(whole, run, moments[_key(run)].view(-1))
        part.collect(whole)
        return whole[name]

    def load(self, moments: Mapping[str, Tensor], updates: int) -> None:
        """Take moments ``first.<name>`` and ``second.<name>``, when the parameters have been given their values."""
        if not self.sharded:
            self.optimizer.load_state_dict(moments, updates)
            return
        if self.store is None:
            for key, values in self._own(self.parameters).items():
                self.own[key].copy_(values)
        runs: dict[str, Tensor] = {}
        for kind in ("first", "second"):
            own = self._own({name: moments[f"{kind}.{name}"] for name in self.parameters})
            runs |= {f"{kind}.{key}": tensor for key, tensor in own.items()}
        self.optimizer.load_state_dict(runs, updates)

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self._keyed({run: self.shards.read(tensors, run) for run in self.shards.own})

    def _keyed(self, runs: Mapping[Run, Tensor]) -> dict[str, Tensor]:
        """Runs by name; [1, n] where the parameter is a matrix, as only those have weight decay."""
        found = {}
        for run, values in runs.items():
            found[_key(run)] = values[None] if self.parameters[run.name].dim() >= 2 else values
        return found


def _key(run: Run) -> str:
    return f"{run.name}[{run.segment}:{run.start}]"
