"""The engine of a mesh: a pipeline on this rank's part of the model, gradients of replicas added by the fixed tree."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.config.train import OptimizerConfig
from lockstep.model import Decoder, Model
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.partition import Partition
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.recompute import recomputing
from lockstep.parallel.reduction import Reduction, global_norm
from lockstep.parallel.shards import Run, Shards
from lockstep.parallel.stages import TIED
from lockstep.parallel.tree import spread
from lockstep.train.data import Batch, Dataset
from lockstep.train.evaluate import Evaluation, evaluation
from lockstep.train.layout import recompute_policy
from lockstep.train.mesh_level import LevelOnMesh
from lockstep.train.optimizer import AdamW
from lockstep.train.peak import peak_resident, reset_peak
from lockstep.train.signals import StopRequest
from lockstep.train.step import Compute, StepGradient, logprob_sum, shares, token_weight
from lockstep.train.tree import tree_total


class OnMesh:
    """Training on a mesh; every method that communicates must be called on all ranks.

    parameters: this rank's trained tensors by whole-model name. The micro-batches of the global batch are spread over
    ``dp``; a replica takes its run of them through its pipeline.
    """

    def __init__(
        self,
        mesh: Mesh,
        part: Partition,
        model: Model,
        parameters: dict[str, nn.Parameter],
        config: Config,
        note: Callable[[str], None] = print,
    ) -> None:
        self.mesh, self.part, self.model = mesh, part, model
        self.leaves = config.train.micro_batches
        self.mine = spread(self.leaves, mesh.shape.dp)[mesh["dp"].index]
        self.names, self.parameters = part.names, parameters
        self._shapes: dict[str, Tensor] = dict(parameters if part.whole else Decoder(part.config).named_parameters())
        self.owned = {name: parameters[name] for name in part.owned(list(parameters))}
        self.shards = Shards(self.owned, {name: part.local_cut(name) for name in self.owned}, mesh["dp"])
        self.moments = Moments(self.owned, self.shards, config.optimizer, model, config.parallel.fsdp)
        policy = recompute_policy(config.parallel, mesh["pp"].index)
        held = sorted(layer for group in part.groups for layer in part.stages.layers[group])
        again = policy.chosen(held)
        self.pipeline = Pipeline(
            mesh["pp"], part.table, part.stages, model.decoder, model.ops, model.dtype, parameters, recomputing(again)
        )
        self.level = LevelOnMesh(mesh, part, model, self.pipeline, self.moments.optimizer, again, config, note)

    def stopping(self, stop: StopRequest) -> bool:
        asked = torch.tensor([float(signal.Signals[stop.signal]) if stop.signal else 0.0])
        found = max(int(number) for number in self.mesh.world.gather(asked))
        if found:
            stop.signal = signal.Signals(found).name
        return bool(stop)

    def gradient(self, batches: Sequence[Batch], z_loss: float, stop: Callable[[], bool]) -> StepGradient:
        """All of it: ranks that stopped at different micro-batches would wait for each other for ever."""
        reset_peak()
        self.mesh.take_traffic()
        self.level.prepare()
        weight, sums = token_weight(batches), Reduction(self.owned, self.shards, self.leaves)
        found = torch.zeros(self.leaves, 2, dtype=torch.float64)

        def finish(m: int, hidden: Tensor) -> Tensor:
            batch = batches[self.mine[m]]
            objective, loss = shares(self.model.decoder, self._compute, hidden, batch, weight, z_loss)
            ended(m, float(objective.detach()), loss)
            return objective

        def put(name: str, m: int, gradient: Tensor) -> None:
            sums.put(name, self.mine[m], gradient)

        def ended(m: int, objective: float, loss: float) -> None:
            found[self.mine[m]] = torch.tensor([objective, loss], dtype=torch.float64)

        mine = [batches[i] for i in self.mine]
        self.pipeline.step(mine, finish, put, self.level.work(mine, weight, ended))
        total = sums.total()
        objectives, losses = self._merged(found).T.tolist()
        return StepGradient([total[name] for name in self.owned], tree_total(losses), tree_total(objectives))

    def norm(self, found: StepGradient) -> float:
        gradient = dict(zip(self.owned, found.gradient, strict=True))
        cuts = {name: self.part.cut(name) for name in self.names}
        return global_norm(gradient, self.shards, cuts, self.names, self.mesh, self.model.ops)

    def update(self, found: StepGradient, lr: float, scale: float) -> None:
        gradient = dict(zip(self.owned, found.gradient, strict=True))
        self.moments.update(gradient, lambda own: self.level.update(own, lr, scale))
        self._share_tied()

    def evaluate(self, data: Dataset, sequences: int, micro_batch: int) -> Evaluation | None:
        batches = list(data.held_out_batches(sequences, micro_batch))
        if not batches:
            return None
        mine = spread(len(batches), self.mesh.shape.dp)[self.mesh["dp"].index]
        sums = torch.zeros(len(batches), 2, dtype=torch.float64)

        def finish(m: int, hidden: Tensor) -> Tensor:
            batch = batches[mine[m]]
            weights = torch.ones(batch.targets.shape, dtype=torch.float32)
            decoder = self.model.decoder
            loss, logprobs = self.model.ops.linear_cross_entropy(
                hidden, decoder.head_weight, batch.targets, weights, softcap=decoder.logit_softcap
            )
            sums[mine[m], 0] = logprob_sum(logprobs, batch.targets)
            return loss

        self.pipeline.forward([batches[i] for i in mine], finish)
        return evaluation(self._merged(sums)[:, 0].tolist(), batches, data)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        held = {name: p.detach() for name, p in (self.owned if self.part.whole else self._held()).items()}
        weights = self._whole(held, self.names if self.part.whole else list(self._shapes))
        moments: dict[str, Tensor] = {}
        for kind in ("first", "second"):
            found = self._whole(self.moments.local(kind), self.names)
            moments |= {f"{kind}.{name}": tensor for name, tensor in found.items()}
        return (weights, moments) if self.mesh.first else None

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.part.take(name, weights[name]))
        taken = {
            key: self.part.take(name, moments[key])
            for name in self.owned
            for key in (f"first.{name}", f"second.{name}")
        }
        self.moments.load(taken, updates)

    def expected(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        whole = {name: self._shapes[name] for name in self.names}
        moments = {f"{kind}.{name}": tensor for kind in ("first", "second") for name, tensor in whole.items()}
        return whole, moments

    def whole_model(self) -> Model | None:
        if self.part.whole:
            return self.model if self.mesh.first else None
        found = self._whole(self._held(), list(self._shapes))
        if not self.mesh.first:
            return None
        decoder = Decoder(self.part.config)
        for name, tensor in found.items():
            owner, _, leaf = name.rpartition(".")
            setattr(decoder.get_submodule(owner), leaf, nn.Parameter(tensor, self._shapes[name].requires_grad))
        return Model(decoder, self.model.tokenizer, self.model.ops, self.model.dtype)

    def _held(self) -> dict[str, Tensor]:
        """Every weight of this rank's decoder, by name; those it does not hold are on the meta device."""
        return {name: p.detach() for name, p in self.model.decoder.named_parameters()}

    def report(self) -> dict[str, object]:
        traffic = self.mesh.take_traffic()
        axes = (*self.mesh.axes, "world")
        numbers = [float(peak_resident()), *(float(traffic[a].bytes) if a in traffic else 0.0 for a in axes)]
        ranks = [row.tolist() for row in self.mesh.world.gather(torch.tensor(numbers, dtype=torch.float64))]
        sent = {axis: int(sum(row[i + 1] for row in ranks)) for i, axis in enumerate(axes)}
        return {"peak_memory": [int(row[0]) for row in ranks], "sent_bytes": {a: n for a, n in sent.items() if n}}

    @property
    def _compute(self) -> Compute:
        return Compute(self.model.ops, self.model.dtype)

    def _merged(self, table: Tensor) -> Tensor:
        """Numbers that each replica's last stage has a part of, zero elsewhere."""
        return self.mesh["dp"].merge(self.mesh["pp"].merge(table))

    @torch.no_grad()
    def _share_tied(self) -> None:
        """The owner of a tied embedding gives the updated weight to the stage that embeds with it."""
        axis, last = self.mesh["pp"], self.part.table.holder(self.part.stages.groups - 1)[0]
        if TIED not in self.parameters or not self.part.stages.tied or last == 0:
            return
        weight = self.parameters[TIED]
        if axis.index == last:
            axis.send(weight.detach(), 0).wait()
        else:
            axis.receive(weight.detach(), last).wait()
            torch.autograd.graph.increment_version(weight)

    @torch.no_grad()
    def _whole(self, local: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """On the first rank the whole tensors of these names; the others send their slices. One tensor at a time."""
        found = {}
        for name in names:
            owners = self.part.owner(name)
            if not self.mesh.first:
                if self.mesh.rank in owners:
                    self.mesh.world.send(local[name].contiguous(), 0).wait()
                continue
            slices = [local[name]] if 0 in owners else []
            for rank in owners[len(slices) :]:
                out = torch.empty(self.part.take(name, self._shapes[name]).shape)
                self.mesh.world.receive(out, rank).wait()
                slices.append(out)
            found[name] = self.part.join(name, slices)
        return found


class Moments:
    """The optimizer over this rank's parameters: whole on every replica, or each replica's runs (ZeRO-1).

    ZeRO (arXiv 1910.02054) level 1: a replica updates the runs that it owns and sends them to the others.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], shards: Shards, config: OptimizerConfig, model: Model, level: int
    ) -> None:
        self.parameters, self.shards, self.sharded = dict(parameters), shards, level > 0 and shards.axis.size > 1
        self.own = self._own(self.parameters) if self.sharded else self.parameters
        self.optimizer = AdamW(self.own, config, model.ops)

    def update(self, gradient: dict[str, Tensor], step: Callable[[list[Tensor]], None]) -> None:
        """One step. gradient: whole-size tensors of which the own runs are valid. step: the optimizer's, by the
        gradients of its parameters."""
        if not self.sharded:
            self.shards.collect(gradient)
            step(list(gradient.values()))
            return
        step(list(self._own(gradient).values()))
        for run in self.shards.own:  # where a run is a view of its parameter it is there already
            self.shards.write(self.parameters, run, self.own[_key(run)].view(-1))
        self.shards.collect(self.parameters)
        for parameter in self.parameters.values():
            torch.autograd.graph.increment_version(parameter)

    def local(self, kind: str) -> dict[str, Tensor]:
        """The first or second moments of this rank's parameters, whole."""
        moments = self.optimizer.first if kind == "first" else self.optimizer.second
        if not self.sharded:
            return dict(moments)
        whole = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        for run in self.shards.own:
            self.shards.write(whole, run, moments[_key(run)].view(-1))
        self.shards.collect(whole)
        return whole

    def load(self, moments: Mapping[str, Tensor], updates: int) -> None:
        """Take moments ``first.<name>`` and ``second.<name>``, when the parameters have been given their values."""
        if not self.sharded:
            self.optimizer.load_state_dict(moments, updates)
            return
        for key, values in self._own(self.parameters).items():
            self.own[key].copy_(values)
        runs: dict[str, Tensor] = {}
        for kind in ("first", "second"):
            own = self._own({name: moments[f"{kind}.{name}"] for name in self.parameters})
            runs |= {f"{kind}.{key}": tensor for key, tensor in own.items()}
        self.optimizer.load_state_dict(runs, updates)

    def _own(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The own runs; [1, n] where the parameter is a matrix, as only those have weight decay."""
        found = {}
        for run in self.shards.own:
            values = self.shards.read(tensors, run)
            matrix = self.parameters[run.name].dim() >= 2
            found[_key(run)] = values[None] if matrix else values
        return found


def _key(run: Run) -> str:
    return f"{run.name}[{run.segment}:{run.start}]"
