"""What a rank's step is at each compile level: programs, calls, memory, messages. Compiled, but never run.

Recipes know every size, so a rank of a mesh that is not there can be compiled here, on the meta device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from lockstep.compile import CannotCompile, Compiler, GroupPrograms, Placer, Span
from lockstep.compile.passes import Level
from lockstep.compile.recipe import Recipe, sent
from lockstep.config import Config, ModelConfig
from lockstep.memory.recompute import RecomputePolicy
from lockstep.model import Decoder
from lockstep.ops import operators
from lockstep.parallel.nodes import Group
from lockstep.parallel.partition import Partition
from lockstep.parallel.schedules import Step, Table
from lockstep.quantities import size
from lockstep.train.dryrun import rank_of
from lockstep.train.layout import layer_policy


@dataclass(frozen=True)
class LevelReport:
    """One level on one rank. Numbers of a micro-batch through all of the rank's groups, bytes at the largest one.

    recipes: kinds of stages compiled, in so many seconds. calls: of operators, by kind of step. kept, later: what one
    micro-batch in flight holds from its forward pass on, and from there for gradients of weights that are put off.
    experts: what it holds beside of rows of experts that ranks share out, where all are chosen alike. offloaded: layers
    whose part of it leaves memory. in_flight: the most at once. scratch: shared by all. messages, summed: of sums over
    tensor-parallel ranks, and bytes added up in them. passes: places changed, by pass. reason: why it is not
    compiled, or nothing.
    """

    level: str
    recipes: int = 0
    seconds: float = 0.0
    calls: dict[str, int] = field(default_factory=dict)
    kept: int = 0
    experts: int = 0
    offloaded: int = 0
    later: int = 0
    in_flight: int = 0
    scratch: int = 0
    messages: int = 0
    summed: int = 0
    passes: dict[str, int] = field(default_factory=dict)
    reason: str = ""


def level_reports(config: Config, shape: ModelConfig, rank: int, levels: Sequence[Level]) -> list[LevelReport]:
    """Compile what a rank computes with, at these levels."""
    _, part, decoder = rank_of(config, shape, rank)
    return [_report(level, config, part, decoder) for level in levels]


def _report(level: Level, config: Config, part: Partition | None, decoder: Decoder) -> LevelReport:
    how = config.compile
    compiler = Compiler(level, how.disable_pass, how.only_pass, recompute=RecomputePolicy(how.recompute))
    try:
        groups = _groups(compiler, config, part, decoder)
    except CannotCompile as error:
        return LevelReport(level, reason=str(error))
    rows = _units(config, part)[0]
    found = [_recipes(group) for group in groups]
    passes: Counter[str] = Counter()
    for one in (report for stage in compiler.reports for report in stage.passes):
        passes[one.name] += one.changed
    flying, away = [1], 0
    if part is not None:
        away = len(layer_policy(config.parallel, part.mesh["pp"].index).chosen(part.layers).away)
        device = part.mesh["pp"].index
        flying = [most_in_flight(part.table, device, chunk) for chunk in range(part.table.chunks)]
    messages = [sent(recipe, rows) for kinds in found for recipes in kinds.values() for recipe in recipes]
    return LevelReport(
        level,
        len(compiler.reports),
        sum(sum(stage.seconds.values()) for stage in compiler.reports),
        {kind: sum(len(r.calls) for kinds in found for r in kinds[kind]) for kind in found[0]},
        sum(group.memory.kept for group in groups),
        0 if part is None else _kept_by_experts(config, part, decoder),
        away,
        sum(group.memory.later for group in groups) if groups[0].span.deferring else 0,
        max(flying),
        max(group.memory.scratch for group in groups),
        sum(len(one) for one in messages),
        sum(sum(one) for one in messages),
        dict(+passes),
    )


def _kept_by_experts(config: Config, part: Partition, decoder: Decoder) -> int:
    """Bytes of `spread_experts.Kept` for a micro-batch: a device gets as many rows as it sends."""
    shape, dtype = decoder.config, getattr(torch, config.train.dtype)
    if part.experts is None:
        return 0
    again = layer_policy(config.parallel, part.mesh["pp"].index).chosen(part.layers).again
    layers = sum(shape.has_experts(i) and i not in again for i in part.layers)
    rows = config.train.micro_batch * config.data.seq_len * shape.experts_per_token
    width = shape.expert_intermediate_size or shape.intermediate_size
    return int(layers * rows * (shape.hidden_size + 3 * width) * dtype.itemsize)


def most_in_flight(table: Table, device: int, chunk: int) -> int:
    """The most micro-batches of a device's chunk that are between their forward pass and their last gradient."""
    alive = most = 0
    last = "W" if table.split_backward else "B"
    parts: Iterable[Step] = (part for step in table.rows[device] for part in step.parts if part.chunk == chunk)
    for part in parts:
        alive += (part.kind == "F") - (part.kind in (last, "BW"))
        most = max(most, alive)
    return most


def _groups(compiler: Compiler, config: Config, part: Partition | None, decoder: Decoder) -> list[GroupPrograms]:
    units, rest = _units(config, part)
    placer, dtype = Placer(units), getattr(torch, config.train.dtype)
    ops, axes = operators("bitwise"), dict[str, Group]()
    spans = [Span(range(len(decoder.layers)), True, True)]
    if part is not None:
        ops = part.operators(ops, captured=True, rest=rest)
        policy = layer_policy(config.parallel, part.mesh["pp"].index)
        again, last = policy.chosen(part.layers).again, part.stages.groups - 1
        spans = [
            Span(layers, group == 0, group == last, again & set(layers), part.table.split_backward)
            for group, layers in ((group, part.stages.layers[group]) for group in part.groups)
        ]
    made = (decoder, ops, dtype, config.train.z_loss, compiler, placer, axes)
    return [GroupPrograms(span, *made) for span in spans]


def _units(config: Config, part: Partition | None) -> tuple[int, int]:
    """The largest micro-batch's rows for each rank that shares them (steps of them), and what is left over."""
    return divmod(config.train.micro_batch * config.data.seq_len, 1 if part is None else part.row_unit)


def _recipes(group: GroupPrograms) -> dict[str, list[Recipe]]:
    """What runs for a micro-batch, by kind of step."""
    ends = [halves for halves in (group.embedding, group.loss) if halves is not None]
    layers = [layer.halves for layer in group.layers]
    again = [h for h, i in zip(layers, group.span.layers, strict=True) if i in group.span.again]
    found = {
        "forward": [h.forward for h in (*layers, *ends)],
        "backward": [h.backward for h in (*layers, *ends) if h.backward is not None] + [h.forward for h in again],
    }
    if group.span.deferring:
        found["weight gradients"] = [h.weights for h in layers if h.weights is not None]
    return found


def levels_text(found: Sequence[LevelReport]) -> str:
    """What `lockstep dryrun` prints of them."""
    return "\n".join(
        ["", "compile levels (a micro-batch; O0 calls the operators above one by one)", *map(_line, found)]
    )


def _line(one: LevelReport) -> str:
    if one.reason:
        return f"{one.level}  operators run one by one (O0): {one.reason}"
    calls = ", ".join(f"{kind} {count:,}" for kind, count in one.calls.items())
    beside = f" and {size(one.experts)} of experts' rows, if all are chosen alike," if one.experts else ""
    later = f" and {size(one.later)} for weight gradients that are put off" if one.later else ""
    away = f" ({one.offloaded} layers' are offloaded, so blocks are programs one by one)" if one.offloaded else ""
    sums = f"; sums over tp: {one.messages:,} messages, {size(one.summed)}" if one.messages else ""
    passes = ", ".join(f"{name} {count:,}" for name, count in one.passes.items())
    lines = [
        f"{one.level}  {one.recipes} kinds of stage compiled in {one.seconds:.1f} s; calls: {calls}{sums}",
        f"    memory: {size(one.kept)}{beside} kept by each of at most {one.in_flight} micro-batches in "
        f"flight{away}{later}, {size(one.scratch)} of scratch",
        f"    passes: {passes or 'none'}",
    ]
    return "\n".join(lines)
