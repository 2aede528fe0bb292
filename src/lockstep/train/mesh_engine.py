"""The engine of a mesh: a pipeline on this rank's part of the model, gradients of replicas added by the fixed tree."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from lockstep.config import Config
from lockstep.memory.layers import recomputing
from lockstep.memory.offload import Offload
from lockstep.model import Decoder, Model
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.gradient_shards import GradientShards
from lockstep.parallel.partition import Partition
from lockstep.parallel.pipeline import Finish, Pipeline, Put, Work
from lockstep.parallel.reduction import Reduction, global_norm
from lockstep.parallel.rules import micro_batches_of
from lockstep.parallel.shards import Run
from lockstep.parallel.stages import TIED
from lockstep.parallel.tree import spread
from lockstep.train.data import Batch, Dataset
from lockstep.train.evaluate import Evaluation, evaluation
from lockstep.train.layout import layer_policy
from lockstep.train.mesh_level import LevelOnMesh
from lockstep.train.moments import Moments
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
        self.train, self.fsdp = config.train, config.parallel.fsdp
        self.bucket = config.parallel.bucket_mb << 20
        self.mine = micro_batches_of(config.parallel, config.train, mesh["dp"].index)
        # Of the replicas that hold the experts together, whose micro-batches an expert's gradients are of.
        places = [mesh.shape.place(rank)["dp"] for rank in mesh["ep"].ranks]
        ours = [micro_batches_of(config.parallel, config.train, place) for place in places]
        self.together = [number for numbers in zip(*ours, strict=False) for number in numbers]
        self.names, self.parameters = part.names, parameters
        self._shapes: dict[str, Tensor] = dict(parameters if part.whole else Decoder(part.config).named_parameters())
        self.owned = {name: parameters[name] for name in part.owned(list(parameters))}
        store = part.store
        self.shards = part.shards(self.fsdp >= 2, parameters) if store is None else store.shards
        self.moments = Moments(self.owned, self.shards, config.optimizer, model, self.fsdp, store)
        policy = layer_policy(config.parallel, mesh["pp"].index)
        treated = policy.chosen(part.layers)
        call, offload = recomputing(treated.again), None
        if treated.away:
            folder = Path(config.parallel.offload_dir or config.train.out).expanduser()
            starts = [part.stages.layers[group].start for group in part.groups]
            offload = Offload(treated.away, starts, folder, note)
            call = offload.calling(call)
        call = call if store is None else store.calling(call)
        # What is added into a sum that is there, or is shared out, need not wait for the rest of the micro-batch.
        layerwise = self.fsdp >= 2 or config.train.group_size > 1
        self.pipeline = Pipeline(
            mesh["pp"], part.table, part.stages, model.decoder, model.ops, model.dtype, parameters, call,
            part.rows, layerwise, store, part.contexts, part.experts, part.first_token,
        )  # fmt: skip
        self.level = LevelOnMesh(
            mesh, part, model, self.pipeline, self.moments.optimizer, treated.again, offload, config, note
        )

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
        weight = token_weight(batches)
        found = torch.zeros(self.train.micro_batches, 2, dtype=torch.float64)

        def finish(m: int, hidden: Tensor) -> Tensor:
            batch = batches[self.mine[m]]
            objective, loss = shares(self.model.decoder, self._compute, hidden, batch, weight, z_loss)
            ended(m, float(objective.detach()), loss)
            return objective

        def ended(m: int, objective: float, loss: float) -> None:
            found[self.mine[m]] = torch.tensor([objective, loss], dtype=torch.float64)

        mine = [batches[i] for i in self.mine]
        work = self.level.work(mine, weight, ended)
        total = self._sharded(mine, finish, work) if self.fsdp >= 2 else self._summed(mine, finish, work)
        objectives, losses = self._merged(found).T.tolist()
        return StepGradient(total, tree_total(losses), tree_total(objectives))

    def _summed(self, mine: list[Batch], finish: Finish, work: Callable[[Put], Work] | None) -> list[Tensor]:
        """Tensors of the parameters that this rank updates; of each its own runs are valid."""
        parts = [(part, part.names) for part in self.shards.by_axis()]
        how = self.train.groups, self.bucket, self.train.group_size
        sums = [Reduction({n: self.owned[n] for n in names}, part, *how) for part, names in parts]
        of = {name: reduction for reduction, (_, names) in zip(sums, parts, strict=True) for name in names}

        def put(name: str, number: int, gradient: Tensor) -> None:
            numbers = self.together if name in self.pipeline.spread else self.mine
            of[name].put(name, numbers[number], gradient)

        def begin() -> None:
            for reduction in sums:
                reduction.begin()

        self.pipeline.step(mine, finish, put, work, begin)
        total = {name: tensor for reduction in sums for name, tensor in reduction.total().items()}
        return [total[name] for name in self.owned]

    def _sharded(self, mine: list[Batch], finish: Finish, work: Callable[[Put], Work] | None) -> list[Tensor]:
        """The own runs (ZeRO-2)."""
        sums = GradientShards(self.owned, self.shards, len(mine), self.train.group_size)
        self.pipeline.step(mine, finish, sums.put, work)
        return list(sums.total().values())

    def norm(self, found: StepGradient) -> float:
        cuts = {name: self.part.cut(name) for name in self.names}
        return global_norm(self._runs(found), self.shards, cuts, self.names, self.mesh, self.model.ops)

    def _runs(self, found: StepGradient) -> dict[Run, Tensor]:
        if self.fsdp >= 2:
            return dict(zip(self.shards.own, found.gradient, strict=True))
        gradient = dict(zip(self.owned, found.gradient, strict=True))
        return {run: self.shards.read(gradient, run) for run in self.shards.own}

    def update(self, found: StepGradient, lr: float, scale: float) -> None:
        def step(own: list[Tensor]) -> None:
            self.level.update(own, lr, scale)

        if self.moments.sharded:
            self.moments.update_runs(self._runs(found), step)
        else:
            self.moments.update(dict(zip(self.owned, found.gradient, strict=True)), step)
        self._share_tied()

    def evaluate(self, data: Dataset, sequences: int, micro_batch: int) -> Evaluation | None:
        batches = list(data.held_out_batches(sequences, micro_batch))
        if not batches:
            return None
        shares = spread(len(batches), self.mesh.shape.dp)
        mine = shares[self.mesh["dp"].index]
        # Replicas that need each other's weights go through as many micro-batches; what is there twice is not counted.
        together = self.part.store is not None or self.part.experts is not None
        more = [0] * (len(shares[0]) - len(mine)) if together else []
        sums = torch.zeros(len(batches), 2, dtype=torch.float64)

        def finish(m: int, hidden: Tensor) -> Tensor:
            batch = batches[[*mine, *more][m]]
            weights = torch.ones(batch.targets.shape, dtype=torch.float32)
            decoder = self.model.decoder
            loss, logprobs = self.model.ops.linear_cross_entropy(
                hidden, decoder.head_weight, batch.targets, weights, softcap=decoder.logit_softcap
            )
            if m < len(mine):
                sums[mine[m], 0] = logprob_sum(logprobs, batch.targets)
            return loss

        self.pipeline.forward([batches[i] for i in (*mine, *more)], finish)
        return evaluation(self._merged(sums)[:, 0].tolist(), batches, data)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Tensor]] | None:
        weights = self._whole(self._weight, self.names if self.part.whole else list(self._shapes))
        moments: dict[str, Tensor] = {}
        for kind in ("first", "second"):
            found = self._whole(functools.partial(self.moments.local, kind), self.names)
            moments |= {f"{kind}.{name}": tensor for name, tensor in found.items()}
        return (weights, moments) if self.mesh.first else None

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], updates: int) -> None:
        store = self.part.store
        for name, parameter in self.parameters.items():
            if store is not None and name in store:
                store.set(name, self.part.take(name, weights[name]))
            else:
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
        found = self._whole(self._weight, list(self._shapes))
        if not self.mesh.first:
            return None
        decoder = Decoder(self.part.config)
        for name, tensor in found.items():
            owner, _, leaf = name.rpartition(".")
            setattr(decoder.get_submodule(owner), leaf, nn.Parameter(tensor, self._shapes[name].requires_grad))
        return Model(decoder, self.model.tokenizer, self.model.ops, self.model.dtype)

    def _weight(self, name: str) -> Tensor:
        """A weight of this rank's decoder. Where weights are sharded all replicas must ask for it."""
        if self.part.store is not None and name in self.part.store:
            return self.part.store.whole(name)
        return self.model.decoder.get_parameter(name).detach()

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
        if axis.index == last:
            axis.send(self._weight(TIED), 0).wait()
        else:
            weight = self.parameters[TIED]
            axis.receive(weight.detach(), last).wait()
            torch.autograd.graph.increment_version(weight)

    @torch.no_grad()
    def _whole(self, local: Callable[[str], Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        """On the first rank the whole tensors of these names; the others send their slices. One tensor at a time.
        local: gives a slice, on every replica of the ranks that hold one, as they may each have a share of it."""
        found = {}
        for name in names:
            owners = self.part.owner(name)
            here = [local(name)] if name in self.owned or self.mesh.rank in owners else []
            if not self.mesh.first:
                if self.mesh.rank in owners:
                    self.mesh.world.send(here[0].contiguous(), 0).wait()
                continue
            slices = here if 0 in owners else []
            for rank in owners[len(slices) :]:
                place = self.mesh.shape.place(rank)["tp"]
                out = torch.empty(self.part.slice_of(place, name, self._shapes[name]).shape)
                self.mesh.world.receive(out, rank).wait()
                slices.append(out)
            found[name] = self.part.join(name, slices)
        return found
