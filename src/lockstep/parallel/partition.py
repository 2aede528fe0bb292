"""The part of a model that one rank holds: layers of its pipeline stage, its slices of what tensor parallelism cuts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from lockstep.config.model import ModelConfig
from lockstep.model.decoder import Decoder
from lockstep.model.split import expert_of, split_of
from lockstep.ops import Operators
from lockstep.ops.contexts import on_contexts
from lockstep.ops.cut_linear import Add, cut_operators
from lockstep.ops.cut_vocabulary import cut_vocabulary
from lockstep.ops.head_parts import Segments
from lockstep.ops.row_share import RowShare
from lockstep.ops.spread_experts import spread_experts
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.expert_nodes import ExpertNodes
from lockstep.parallel.head import shared_head
from lockstep.parallel.nodes import adding
from lockstep.parallel.row_nodes import RowNodes
from lockstep.parallel.row_ranks import RankRows
from lockstep.parallel.schedules import Table
from lockstep.parallel.shards import Cut, Shards
from lockstep.parallel.stages import Stages
from lockstep.parallel.vocabulary_node import node_of
from lockstep.parallel.weight_store import WeightStore


class Partition:
    """Which tensors of the whole model this rank uses and owns, and how a whole tensor becomes its own.

    ``local`` is the configuration of the rank's decoder: that of the whole model with its share of heads, of the MLP's
    width and of the vocabulary. names: of the whole model's parameters that train, in order; by default all.
    sequence_parallel: the rows of activations between cut products are shared out among the tensor-parallel ranks.
    shard_weights: the data-parallel ranks share out the weights that train (``store``). shared_head: the
    tensor-parallel ranks share out the rows of the output projection, and the first gets the logits (serving).
    row_step: rows that context-parallel ranks leave together (`RowShare`).
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: Mesh,
        table: Table,
        stages: Stages,
        names: list[str] | None = None,
        sequence_parallel: bool = False,
        shard_weights: bool = False,
        shared_head: bool = False,
        row_step: int = 1,
    ) -> None:
        self.config, self.mesh, self.table, self.stages = config, mesh, table, stages
        self.groups = [table.group(mesh["pp"].index, chunk) for chunk in range(table.chunks)]
        tp = mesh["tp"]
        self.vocabulary = Segments(config.vocab_size, config.canonical_tp, config.canonical_tp // tp.size, tp.index)
        self._shared_head = shared_head and tp.size > 1
        self.local = local_config(config, tp.size, config.vocab_size if shared_head else self.vocabulary.held)
        self.contexts = mesh["cp"] if mesh.shape.cp > 1 else None
        self.experts = mesh["ep"] if mesh.shape.ep > 1 else None
        self.rows: RankRows | None = None
        if self.contexts is not None:
            self.rows = RankRows(self.contexts, row_step)
        elif sequence_parallel and mesh.shape.tp > 1:
            self.rows = RankRows(mesh["tp"])
        self.names = names or [name for name, p in Decoder(config).named_parameters() if p.requires_grad]
        self.store = WeightStore(self.shards(by_unit=True)) if shard_weights and mesh["dp"].size > 1 else None

    @property
    def sharded(self) -> frozenset[str]:
        """The parameters of which this rank keeps its runs only."""
        return frozenset() if self.store is None else frozenset(self.owned(self.names))

    @property
    def layers(self) -> list[int]:
        """The layers that this rank holds, in order."""
        return sorted(layer for group in self.groups for layer in self.stages.layers[group])

    @property
    def row_unit(self) -> int:
        """Rows in all for each step of rows that every rank has of a micro-batch's activations."""
        return 1 if self.rows is None else self.rows.axis.size * self.rows.step

    @property
    def named_axes(self) -> list[str]:
        """Those that captured operators name: of several ranks, or of a vocabulary in segments."""
        segments = self.config.canonical_tp > 1
        return [a for a in ("tp", "cp", "ep") if self.mesh[a].size > 1 or (a == "tp" and segments)]

    @property
    def first_token(self) -> int:
        """Of those whose rows of the embedding this rank has."""
        return 0 if self._shared_head else self.vocabulary.first

    @property
    def whole(self) -> bool:
        """Whether this rank holds all of the model."""
        return self.mesh.shape.pp == self.mesh.shape.tp == self.mesh.shape.ep == 1 and self.store is None

    def operators(self, ops: Operators, captured: bool = False, rest: int = 0) -> Operators:
        """The operators with products that reach across the tensor-parallel ranks where a weight is cut, and rows that
        go to the ranks of their experts. captured: for a graph, in which what reaches across are nodes; where rows are
        shared, of numbers that leave this rest."""
        if self.experts is not None and captured:
            where = f"experts {self.experts.index} of {self.experts.size}"
            ops = replace(ops, experts=ExpertNodes("ep", self.experts), cut_as=where)
        elif self.experts is not None:
            ops = spread_experts(ops, self.experts)
        segments, axis = self.config.canonical_tp, self.mesh["tp"]
        add = adding("tp") if captured and axis.size > 1 else axis.add
        ops = self._with_vocabulary(ops, add, captured)
        over = "over tp" if axis.size > 1 else ""
        rows: RankRows | RowNodes | None = self.rows
        if captured and self.rows is not None:
            share = RowShare(self.rows.axis.size, self.rows.axis.index, rest, self.rows.step)
            ops, rows = replace(ops, share=share), RowNodes(self.rows.axis.name, share)
        if self.contexts is None:
            found = cut_operators(ops, segments, segments // axis.size, add, over, rows)
            if not self._shared_head:
                return found
            head = shared_head(ops, axis, self.config.vocab_size)
            return replace(found, cut={**found.cut, "vocabulary": head})
        assert rows is not None
        return cut_operators(on_contexts(ops, rows, captured), segments, segments // axis.size, add, over)

    def _with_vocabulary(self, ops: Operators, add: Add, captured: bool) -> Operators:
        axis, segments = self.mesh["tp"], self.vocabulary
        if self._shared_head:  # each rank has all rows, and whoever has the logits has all of them
            return cut_vocabulary(ops, replace(segments, here=segments.count, index=0))
        part = node_of(segments, axis.name) if captured else None
        return cut_vocabulary(ops, segments, add, axis.gather, part)

    @property
    def place(self) -> str:
        """Which of the tensor-parallel slices this rank holds, in words; "" where there is one."""
        axis = self.mesh["tp"]
        return "" if axis.size == 1 else f"rank {axis.index} of {axis.size}"

    def shards(self, by_unit: bool, parameters: Mapping[str, Tensor] | None = None) -> Shards:
        """How the data-parallel ranks share out the parameters that this rank updates, by default the decoder's."""
        tensors = dict(Decoder(self.local).named_parameters()) if parameters is None else parameters
        owned = {name: tensors[name] for name in self.owned(self.names)}
        # The replicas of an expert are fewer than those of all else.
        apart = {} if self.experts is None else {n: self.mesh["edp"] for n in owned if expert_of(n) is not None}
        return Shards(owned, {name: self.local_cut(name) for name in owned}, self.mesh["dp"], by_unit, apart)

    def owned(self, names: list[str]) -> list[str]:
        """Of these parameters, those that this rank updates (its slice of them)."""
        return self._held(self.stages.owned(names, self.groups))

    def used(self, names: list[str]) -> list[str]:
        """Of these parameters, those that this rank computes with."""
        return self._held(self.stages.used(names, self.groups))

    def cut(self, name: str) -> Cut:
        """How the whole model's tensor is cut into canonical segments."""
        module, _, leaf = name.rpartition(".")
        count, split = self.config.canonical_tp, split_of(module)
        if count == 1 or split is None or (split == "rows" and leaf == "bias"):
            return Cut()
        if split == "vocabulary" and self._shared_head:
            return Cut()
        return Cut(1 if split == "rows" else 0, count)

    def local_cut(self, name: str) -> Cut:
        """How this rank's tensor is cut into canonical segments."""
        cut = self.cut(name)
        count = cut.segment_count // self.mesh.shape.tp
        return Cut() if cut.dim is None or count == 1 else Cut(cut.dim, count)

    def take(self, name: str, whole: Tensor) -> Tensor:
        """This rank's slice of a whole tensor: a view."""
        return self.slice_of(self.mesh["tp"].index, name, whole)

    def slice_of(self, index: int, name: str, whole: Tensor) -> Tensor:
        """The slice of the tensor-parallel rank at this place: a view."""
        return self._pieces(name, whole)[index]

    def join(self, name: str, slices: list[Tensor]) -> Tensor:
        """The whole tensor of all tensor-parallel ranks' slices."""
        dim = self.cut(name).dim
        return slices[0] if dim is None or len(slices) == 1 else torch.cat(slices, dim=dim)

    def owner(self, name: str) -> list[int]:
        """The ranks (of the first data-parallel replica) whose slices together are the whole tensor."""
        device, _ = self.table.holder(self.stages.group_of(name))
        cut, holder = self.cut(name).dim is not None, self._holder(name) or 0
        return [self.mesh.shape.rank(pp=device, dp=holder, tp=i) for i in range(self.mesh.shape.tp if cut else 1)]

    def decoder(self, whole: Callable[[str, torch.Size], Tensor]) -> Decoder:
        """A decoder with this rank's tensors in float32, the others on the meta device. whole: gives a whole tensor
        by name and shape; asked only for those that are used here."""
        shapes = dict(Decoder(self.config).named_parameters())
        decoder, trained = Decoder(self.local), set(self.owned(self.names))
        for name in self.used(list(shapes)):
            owner, _, leaf = name.rpartition(".")
            value = self.take(name, whole(name, shapes[name].shape))
            own = value.detach().to(torch.float32, memory_format=torch.contiguous_format, copy=True)
            parameter = nn.Parameter(own, requires_grad=shapes[name].requires_grad)
            setattr(decoder.get_submodule(owner), leaf, parameter)
            if self.store is not None and name in trained:
                self.store.take(name, parameter)
        return decoder

    def _held(self, names: list[str]) -> list[str]:
        """Without the experts of other ranks."""
        here = None if self.experts is None else self.experts.index
        return [name for name in names if self._holder(name) in (None, here)]

    def _holder(self, name: str) -> int | None:
        """The place along ``ep`` of the rank that has this expert's weight; None for what each has."""
        expert = expert_of(name)
        if self.experts is None or expert is None:
            return None
        return expert * self.experts.size // self.config.num_experts

    def _pieces(self, name: str, whole: Tensor) -> list[Tensor]:
        cut, ranks = self.cut(name), self.mesh.shape.tp
        return [whole] * ranks if cut.dim is None else cut.runs(whole, ranks)


def local_config(config: ModelConfig, tp: int, vocabulary: int) -> ModelConfig:
    """The configuration of one of ``tp`` ranks: its share of the heads, of the MLP's width and of the vocabulary."""
    return config.model_copy(update={
        "vocab_size": vocabulary,
        "num_heads": config.num_heads // tp,
        "num_kv_heads": config.num_kv_heads // tp,
        "intermediate_size": config.intermediate_size // tp,
    })  # fmt: skip
