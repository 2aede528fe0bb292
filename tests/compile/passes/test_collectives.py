"""Bucketing and overlap order of collectives: on a group of one rank, and (slow) between two processes.

The slow test: `pytest -m slow tests/compile/passes/test_collectives.py`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from lockstep.compile.passes import PassContext, apply
from lockstep.compile.passes.buckets import BUCKETS
from lockstep.compile.passes.overlap import OVERLAP
from lockstep.memory.liveness import liveness
from tests.compile.passes.graphs import capture, check, example_inputs, run, same, targets

RAW = torch.ops._c10d_functional


@pytest.fixture(autouse=True)
def group() -> Iterator[str]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD.group_name  # type: ignore[union-attr]
    dist.destroy_process_group()


def name() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


def gather(x: Tensor) -> Tensor:
    return RAW.all_gather_into_tensor(x, 1, name())


def total(x: Tensor, kind: str = "sum") -> Tensor:
    return RAW.all_reduce(x, kind, name())


def wait(x: Tensor) -> Tensor:
    return RAW.wait_tensor(x)


def short(module: fx.GraphModule) -> list[str]:
    found = [t.removeprefix("_c10d_functional.").removesuffix(".default") for t in targets(module)]
    return [t for t in found if "getitem" not in t]


def layered(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Two gathers whose results are needed late, and one that is needed at once."""
    x, y = gather(a), gather(b)
    x, y = wait(x), wait(y)
    z = a.exp()
    w = wait(gather(z))
    return x + y + w, z


def test_gathers_that_are_needed_later_go_together() -> None:
    module = capture(layered, *example_inputs())
    assert check(BUCKETS, module, example_inputs()).count == 3
    assert short(module).count("all_gather_into_tensor_coalesced") == 1
    small = capture(layered, *example_inputs())
    assert check(BUCKETS, small, example_inputs(), bucket_bytes=128).count == 2
    assert short(small).count("all_gather_into_tensor_coalesced") == 1


def test_a_bucket_ends_where_a_result_is_needed_or_what_is_sent_is_written() -> None:
    def needed(a: Tensor, b: Tensor) -> Tensor:
        return wait(gather(wait(gather(a)) + b))

    def overwritten(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        x = gather(a)
        x = wait(x)
        a.mul_(2)
        return x + 1, wait(gather(a)) + 1

    for program in (needed, overwritten):
        assert check(BUCKETS, capture(program, *example_inputs()), example_inputs()).count == 0


def test_float_sums_go_together_only_where_the_library_adds_every_element_alike() -> None:
    def sums(a: Tensor, b: Tensor) -> Tensor:
        x, y = total(a), total(b)
        return wait(x) + wait(y)

    changes = check(BUCKETS, capture(sums, *example_inputs()), example_inputs())
    assert changes.count == 0
    assert "depend on where an element lies" in changes.notes[0]
    assert check(BUCKETS, capture(sums, *example_inputs()), example_inputs(), sums_by_element=True).count == 2
    largest = capture(lambda a, b: wait(total(a, "max")) + wait(total(b, "max")), *example_inputs())
    assert check(BUCKETS, largest, example_inputs()).count == 2


def test_other_groups_dtypes_and_kinds_stay_apart() -> None:
    def mixed(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        x, y, z = gather(a), gather(b.to(torch.bfloat16)), total(a, "max")
        return wait(x) + 1, wait(y) + 1, wait(z) + 1

    assert check(BUCKETS, capture(mixed, *example_inputs()), example_inputs()).count == 0


def test_collectives_begin_early_and_are_waited_for_late() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        y = b.exp().sin()
        x = wait(gather(a))
        z = y * 2 + 1
        return z + x

    module = capture(program, *example_inputs())
    assert check(OVERLAP, module, example_inputs()).count == 2
    assert short(module) == [
        "all_gather_into_tensor", "exp", "sin", "mul.Tensor", "add.Tensor", "wait_tensor", "add.Tensor",
    ]  # fmt: skip


def test_what_moves_before_a_wait_goes_with_what_it_reads() -> None:
    """A value that both it and what waits read stays behind, and so does it."""

    def program(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = wait(gather(a))
        shared = b.exp()
        return x * shared, b * shared, b.sin()

    module = capture(program, *example_inputs())
    assert check(OVERLAP, module, example_inputs()).count == 1
    assert short(module) == ["all_gather_into_tensor", "sin", "exp", "wait_tensor", "mul.Tensor", "mul.Tensor"]


def test_nothing_moves_over_a_write_or_another_collective() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        first = gather(a)
        first = wait(first)
        a.mul_(3)
        second = wait(gather(b))
        return first + second + a

    module = capture(program, *example_inputs())
    check(OVERLAP, module, example_inputs())
    order = short(module)
    assert order.index("mul_.Tensor") < order.index("all_gather_into_tensor")
    assert order.index("wait_tensor") < len(order) - 1 - order[::-1].index("mul_.Tensor")


def test_what_is_sent_stays_alive_until_it_has_arrived() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        x = gather(a + b)
        y = b.exp() * 2
        return wait(x) + y

    module = capture(program, *example_inputs())
    steps = {n.name: i for i, n in enumerate(module.graph.nodes)}
    found = liveness(module.graph)
    spans = {where[0].name: b for where, b in zip(found.owners, found.buffers, strict=True)}
    assert spans["add"].last == steps["wait_tensor"]


def _rank(rank: int, folder: str, results: Any) -> None:
    dist.destroy_process_group() if dist.is_initialized() else None
    dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(f"{folder}/store", 2))
    inputs = [x + rank for x in example_inputs()]

    def program(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        x, y = (RAW.all_gather_into_tensor(t, 2, name()) for t in (a, b))
        s, t = total(a, "max"), total(b * 2, "max")
        z = (a * b).exp()
        return wait(x).sum(0) + z[0], wait(y).sum(0), wait(s) + z, wait(t) + z

    module = capture(program, *inputs)
    before = run(module, inputs)
    reports = apply(module, [BUCKETS, OVERLAP], PassContext())
    results.put((rank, same(before, run(module, inputs)), [report.changed for report in reports]))
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_get_the_bytes_of_the_graph_as_captured(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, str(tmp_path), results)) for rank in range(2)]
    for process in ranks:
        process.start()
    found = sorted(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.join(30)
    assert [(rank, equal) for rank, equal, _ in found] == [(0, True), (1, True)]
    assert found[0][2][0] == 4
