"""The dry-run: one whole training step on the meta device, by the code that trains and nothing beside it.

No weight is allocated and no product computed, so a model of any size takes seconds. What is seen is what the step
would do: parameters, gradients, optimizer, every activation, the peak and its moment, FLOPs and bytes per operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config import Config, ModelConfig, load_config
from lockstep.errors import LockstepError
from lockstep.model import Decoder, Model
from lockstep.model.files import read_json
from lockstep.model.hf_config import read_config
from lockstep.model.source import ALIASES, told
from lockstep.ops import Operators, Packed, check_head_dim, operators
from lockstep.parallel.collectives import Mesh, Traffic
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.partition import Partition
from lockstep.parallel.pipeline import Pipeline
from lockstep.parallel.rules import check_positions, micro_batches_of, with_segments
from lockstep.parallel.schedules import Step
from lockstep.parallel.transport import Pending
from lockstep.plan.decoder_config import decoder_config
from lockstep.plan.named_shape import model_shape
from lockstep.plan.planfile import load_plan
from lockstep.plan.watch import OperatorCost, Peak, Watch
from lockstep.train.data import Batch
from lockstep.train.engine import Engine, OneProcess
from lockstep.train.layout import partition
from lockstep.train.mesh_engine import OnMesh
from lockstep.train.optimizer import AdamW
from lockstep.train.planned import planned

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class DryRun:
    """What one optimizer step takes on one rank. Bytes and FLOPs of the whole step.

    parameters: of the rank. weights, optimizer: bytes that stay. micro_batches: that the rank goes through, of so many
    tokens. peak: the largest moment. history: live bytes after every operator. traffic: what is sent along each axis.
    """

    rank: int
    mesh: MeshShape
    parameters: int
    weights: int
    optimizer: int
    micro_batches: int
    tokens: int
    peak: Peak
    operators: dict[str, OperatorCost]
    history: list[int]
    traffic: dict[str, Traffic]

    @property
    def flops(self) -> float:
        return sum(cost.flops for cost in self.operators.values())


def dry_run(config: Config, shape: ModelConfig, rank: int = 0, told: Progress = lambda done, total: None) -> DryRun:
    """Run a step of `config` with a model of `shape`, as one rank of its mesh: full sequences of `data.seq_len` tokens.

    told: hears how many steps of the rank's row of the schedule are begun, of how many (of one process: micro-batches).
    Raises LockstepError for what training would refuse, and for adapters and `numerics: fast`, which it does not run.
    """
    mesh, part, decoder = rank_of(config, shape, rank)
    train, asked, moment = config.train, mesh.shape, _Moment(told)
    batches = [_batch(train.micro_batch, config.data.seq_len, shape.vocab_size) for _ in range(train.micro_batches)]
    named = dict(decoder.named_parameters())
    parameters = named if part is None else {name: named[name] for name in part.used(part.names)}
    ops = operators("bitwise") if part is None else part.operators(operators("bitwise"))
    model = Model(decoder, None, moment.labelled(ops), getattr(torch, train.dtype))
    with Watch(moment.here) as watch:
        weights = [p.detach() for name, p in parameters.items() if part is None or name not in part.sharded]
        weights += [] if part is None or part.store is None else part.store.own.values()
        watch.hold(weights, "weights")
        eager = _operator_by_operator(config)
        if part is None:
            optimizer_of_all = AdamW(parameters, config.optimizer, model.ops)
            engine: Engine = OneProcess(model, parameters, optimizer_of_all, eager, print)
        else:
            engine = OnMesh(mesh, part, model, parameters, eager, print)
        optimizer = watch.live - sum(p.nbytes for p in weights)
        watch.hold(_inputs(batches), "tokens")
        moment.follow(engine, decoder, parameters, watch, len(batches))
        found = engine.gradient(batches, train.z_loss, lambda: False)
        assert found is not None
        moment.phase = "update"
        norm = engine.norm(found)
        engine.update(found, config.optimizer.lr, 1.0 / max(norm, 1.0))
    mine = micro_batches_of(config.parallel, train, mesh["dp"].index)
    return DryRun(
        rank=rank,
        mesh=asked,
        parameters=sum(p.numel() for p in parameters.values()),
        weights=sum(p.nbytes for p in weights),
        optimizer=optimizer,
        micro_batches=len(mine),
        tokens=train.micro_batch * config.data.seq_len,
        peak=watch.peak(),
        operators=watch.operators,
        history=list(watch.history),
        traffic=mesh.take_traffic(),
    )


def rank_of(config: Config, shape: ModelConfig, rank: int) -> tuple[Mesh, Partition | None, Decoder]:
    """A rank of a mesh of which nobody else is there, its part of the model, and its decoder on the meta device."""
    shape = with_segments(config, shape)
    _check(config, shape, rank)
    asked = MeshShape.of(config.parallel)
    mesh = Mesh(asked, _Nobody(rank, asked.size))
    part = partition(config, shape, mesh)
    decoder = Decoder(shape) if part is None else part.decoder(lambda _, size: torch.empty(size, device="meta"))
    return mesh, part, decoder


def model_config(model: str | ModelConfig, config: Config) -> ModelConfig:
    """What a decoder is, without its weights: from a planner's name, a config.json or its directory, or anything that
    `load` takes (of a GGUF file only the header is read)."""
    if isinstance(model, ModelConfig):
        return model
    path = Path(model).expanduser()
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json" and file.exists():
        return read_config(read_json(file), str(file))
    if path.exists() or model in ALIASES:
        return told(model).config
    return decoder_config(model_shape(model), config.data.seq_len)


def plan_config(file: Path, overrides: Sequence[str] = ()) -> tuple[Config, ModelConfig]:
    """The configuration that runs a plan, and the plan's model. overrides: KEY=VALUE on top."""
    plan = load_plan(file)
    shape = decoder_config(plan.model, plan.batch.seq)
    config = load_config(None, list(overrides)).model_copy(update={"model": shape})
    return planned(config, file), shape


class _Nobody:
    """A transport to ranks that are not there: what is sent is counted by the mesh, what is received has no value.
    Both are kept until they are waited for, as a real one does."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def send(self, tensor: Tensor, to: int) -> Pending:
        return _Begun(tensor)

    def receive(self, out: Tensor, source: int) -> Pending:
        return _Begun(out)


class _Begun:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor: Tensor | None = tensor

    def wait(self) -> None:
        self._tensor = None


class _Moment:
    """Where a step is: told by the modules that run, and by what stands around them."""

    def __init__(self, told: Progress) -> None:
        self.phase, self.micro_batch, self.module = "setup", 0, ""
        self._pipeline: Pipeline | None = None
        self._step: Step | None = None
        self._told, self._begun, self._total = told, 0, 0

    def here(self) -> tuple[str, str]:
        """In words, and the kind of the memory that is allocated now."""
        if self.phase == "setup":
            return self.phase, "optimizer"
        if self.phase == "update":
            return "update", "working"
        step = None if self._pipeline is None else self._pipeline.current
        if step is not self._step:
            self._step = step
            self._one_more()
        batch = f"micro-batch {self.micro_batch}" if step is None else f"step {step}"
        if torch._C._current_graph_task_id() >= 0:
            return f"backward of {batch}, {self._node()}", "working"
        if step is not None and step.kind != "F":
            return f"weight gradients of {batch}", "gradients"
        if self.phase == "loss":
            return f"loss of {batch}", "loss"
        return f"forward of {batch}, {self.module}", "activations"

    def follow(
        self, engine: Engine, decoder: Decoder, parameters: Mapping[str, nn.Parameter], watch: Watch, micro_batches: int
    ) -> None:
        """Hear of steps or micro-batches, modules and gradients."""
        self.phase, self._total = "forward", micro_batches
        if isinstance(engine, OnMesh):
            self._pipeline = engine.pipeline
            self._total = len(self._pipeline.table.rows[self._pipeline.axis.index])
        decoder.register_forward_pre_hook(self._begin)
        for name, module in decoder.named_modules():
            if name and next(module.children(), None) is None:
                module.register_forward_pre_hook(lambda *_, name=name: self._enter(name))
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(lambda p: watch.hold(_gradient(p), "gradients"))

    def labelled(self, ops: Operators) -> Operators:
        """The operators, the loss telling when it runs."""

        def loss(*args: Any, **options: Any) -> tuple[Tensor, ...]:
            self.phase = "loss"
            return ops.linear_cross_entropy(*args, **options)

        return replace(ops, linear_cross_entropy=loss)

    def _begin(self, *_: Any) -> None:
        self.micro_batch += 1
        self._one_more()

    def _one_more(self) -> None:
        """A step, or micro-batch, begins."""
        self._told(self._begun, self._total)
        self._begun += 1

    def _enter(self, name: str) -> None:
        self.phase, self.module = "forward", name

    def _node(self) -> str:
        node = torch._C._current_autograd_node()
        return "" if node is None else node.name().removesuffix("Backward").lstrip("_")


def _gradient(parameter: Tensor) -> list[Tensor]:
    return [] if parameter.grad is None else [parameter.grad]  # none yet, where products for weights are deferred


def _inputs(batches: Iterable[Batch]) -> list[Tensor]:
    return [t for b in batches for t in (b.tokens, b.targets, b.packed.positions, b.packed.starts)]


def _batch(sequences: int, seq: int, vocabulary: int) -> Batch:
    count = sequences * seq  # as many different ones as can be, of all parts of the vocabulary alike
    tokens = torch.arange(count) * max(1, vocabulary // count) % vocabulary
    return Batch(tokens, tokens.clone(), Packed.of([seq] * sequences))


def _operator_by_operator(config: Config) -> Config:
    """The configuration at level O0, where every operator is seen."""
    return config.model_copy(update={"compile": config.compile.model_copy(update={"level": "O0"})})


_MOST_MICRO_BATCHES = 1 << 12
"""Of a rank: each is gone through, operator by operator."""
_MOST_TOKENS = 1 << 26
"""Of a step: tokens, targets and positions of all are made, 2 GB of them."""


def _check(config: Config, shape: ModelConfig, rank: int) -> None:
    parallel, train = config.parallel, config.train
    size = MeshShape.of(parallel).size
    if not 0 <= rank < size:
        raise LockstepError(f"rank {rank} is not in the mesh: it has ranks 0 to {size - 1}")
    if (count := -(-train.micro_batches // parallel.dp)) > _MOST_MICRO_BATCHES:
        raise LockstepError(
            f"train.micro_batches is {train.micro_batches:,}, {count:,} for each of parallel.dp {parallel.dp} "
            f"replicas: the dry-run goes through all of a rank's, at most {_MOST_MICRO_BATCHES:,}. Set fewer: the peak "
            "grows at most by one partial sum of gradients each time their number doubles"
        )
    if (tokens := train.micro_batch * train.micro_batches * config.data.seq_len) > _MOST_TOKENS:
        raise LockstepError(
            f"train.micro_batch {train.micro_batch:,} x train.micro_batches {train.micro_batches:,} x data.seq_len "
            f"{config.data.seq_len:,} = {tokens:,} tokens: the dry-run makes all of a step's, at most "
            f"{_MOST_TOKENS:,}. Set fewer micro-batches"
        )
    check_positions(config, shape)
    if config.lora.rank:
        raise LockstepError("dryrun goes through training of all weights: set lora.rank to 0")
    if config.train.numerics == "fast":
        raise LockstepError(
            "dryrun goes through the kernels of numerics: bitwise; plain PyTorch chooses other temporaries. "
            "Set train.numerics to bitwise"
        )
    check_head_dim(shape.head_dim)
