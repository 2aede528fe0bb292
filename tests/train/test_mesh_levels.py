"""Every layout at O1 and O2: the losses, norms, weights and moments of one process at O0, byte for byte."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks_as_threads import on_threads
from tiny_run import tiny_tree, with_experts

from lockstep.compile import Cache, CannotCompile, Compiler, Flight, GroupPrograms
from lockstep.compile.group_steps import StepProgram
from lockstep.config import Config
from lockstep.config.check import check
from lockstep.parallel import collectives
from lockstep.parallel.collectives import Mesh
from lockstep.parallel.mesh import MeshShape
from lockstep.parallel.weight_store import WeightStore
from lockstep.train import Trainer, compiled, mesh_level, speed
from lockstep.train.engine import OneProcess
from lockstep.train.level_report import level_reports
from lockstep.train.mesh_engine import OnMesh

Tiny = Callable[..., Config]
MODEL = {"num_layers": 4, "num_kv_heads": 2}
TRAIN = {"steps": 2, "micro_batches": 5}
LEVELS = ("O1", "O2")

LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "one process that recomputes": {"recompute": "full"},
    "dp2, moments sharded": {"dp": 2, "fsdp": 1},
    "pp2 1f1b, offloads": {"pp": 2, "recompute_layers": 1, "offload_layers": 1},
    "pp2 zb-v": {"pp": 2, "schedule": "zb-v", "recompute_per_stage": [1, 0]},
    "tp2": {"tp": 2},
    "tp2 pp2, moments sharded": {"tp": 2, "pp": 2, "fsdp": 1, "schedule": "zb-h1", "offload_per_stage": [2, 0]},
    "tp2 pp2 1f1b, rows shared": {"tp": 2, "pp": 2, "sequence_parallel": True, "recompute_layers": 1},
    "cp2": {"cp": 2},
    "cp2 pp2 zb-h1": {"cp": 2, "pp": 2, "schedule": "zb-h1"},
    "dp2, gradients sharded": {"dp": 2, "fsdp": 2},
    "dp2 pp2 zb-v, weights sharded": {"dp": 2, "pp": 2, "fsdp": 3, "schedule": "zb-v"},
    "tp2 dp2, rows and weights shared": {"tp": 2, "dp": 2, "fsdp": 3, "sequence_parallel": True},
}
EXPERTS: dict[str, dict[str, Any]] = {
    "ep2 dp2, recomputes, offloads": {"dp": 2, "ep": 2, "recompute_layers": 1, "offload_layers": 1},
    "ep2 dp4, weights sharded": {"dp": 4, "ep": 2, "fsdp": 3},
    "ep2 dp2 pp2 zb-v, gradients sharded": {"pp": 2, "dp": 2, "ep": 2, "fsdp": 2, "schedule": "zb-v"},
}
LEFT = {("cp2", "O1"), ("one process", "O1"), ("dp2, gradients sharded", "O2")}
"""What other layouts show at that level too."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"family": "qwen3", "qk_norm": True, "head_dim": 16, "tie_embeddings": False},
    "qwen2": {"family": "qwen2", "qkv_bias": True},
}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured before a run is not; sums are sent in parts, as those of larger models are."""
    monkeypatch.setattr(speed, "matrix_peak", lambda dtype: 1e11)
    monkeypatch.setattr(collectives, "_LARGE", 1)


@pytest.fixture(autouse=True)
def _programs(monkeypatch: pytest.MonkeyPatch, programs: Cache) -> None:
    """One compile cache for all, as layouts share their blocks."""
    monkeypatch.setattr(compiled, "Cache", lambda: programs)


def trained(config: Config, parallel: dict[str, Any], level: str, notes: list[str]) -> dict[str, torch.Tensor]:
    """Losses, weights and moments after a run on threads, as the first rank has them."""
    shape = MeshShape(**{key: n for key, n in parallel.items() if key in ("pp", "dp", "cp", "tp", "ep")})

    def work(mesh: Mesh) -> dict[str, torch.Tensor] | None:
        trainer = Trainer(config, mesh=mesh, parallel=parallel, compile={"level": level})
        if mesh.first:
            trainer.display.note = notes.append
            if not isinstance(trainer.run.engine, OneProcess):
                trainer.run.engine.level.note = notes.append
        result = trainer.fit()
        state = trainer.run.engine.state()
        return None if state is None else {"loss": torch.tensor(result.loss), **state[0], **state[1]}

    return on_threads(shape, work)[0]


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


State = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., State]:
    """The state after a run of one process at O0: made once for all layouts that are compared with it."""
    made: dict[str, State] = {}

    def find(model: dict[str, Any], train: dict[str, Any]) -> State:
        key = json.dumps([model, train])
        if key not in made:
            tree = tiny_tree(text, tmp_path_factory.mktemp("alone") / "run", model=model, train=train)
            made[key] = trained(check(Config, tree, "test"), {}, "O0", [])
        return made[key]

    return find


@pytest.mark.parametrize(("name", "level"), [(n, level) for n in LAYOUTS for level in LEVELS if (n, level) not in LEFT])
def test_a_layout_at_a_level_gives_the_bytes_of_one_process_at_o0(
    tiny: Tiny, tmp_path: Path, alone: Callable[..., State], name: str, level: str
) -> None:
    family = {"tp2": "qwen2", "one process": "qwen3", "tp2 pp2, moments sharded": "qwen3"}.get(name, "llama")
    dtype = "bfloat16" if "shared" in name or "sharded" in name or name == "cp2" else "float32"
    more = {"micro_batches": 6, "gradient_groups": 2} if "pp2" in name or LAYOUTS[name].get("fsdp", 0) > 1 else {}
    train = {**TRAIN, **more, "dtype": dtype, "canonical_tp": 2}
    model = {**MODEL, **FAMILIES[family]}
    notes: list[str] = []
    found = trained(tiny(tmp_path / "mesh", model=model, train=train), LAYOUTS[name], level, notes)
    same(found, alone(model, train))
    assert not [note for note in notes if "O0" in note]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_on_several_ranks_at_a_level_give_the_bytes_of_one_process_at_o0(
    tiny: Tiny, tmp_path: Path, alone: Callable[..., State], name: str, level: str
) -> None:
    """The first layer of four is dense; the others have shared experts too."""
    model, train = with_experts("deepseek_v3"), {**TRAIN, "micro_batches": 8, "micro_batch": 1, "dtype": "bfloat16"}
    if "ep2 dp2" in name:
        train["gradient_groups"] = 2
    expected, notes = alone(model, train), list[str]()
    found = trained(tiny(tmp_path / "mesh", model=model, train=train), EXPERTS[name], level, notes)
    same({key: found[key] for key in expected}, expected)  # a mesh has routers' biases too, which do not train
    assert not [note for note in notes if "O0" in note]


def test_experts_keep_as_many_rows_as_are_told(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank may get more than it sends, but all together get what they send."""
    held, backward = list[int](), GroupPrograms.backward

    def counted(programs: GroupPrograms, flight: Flight, *rest: Any) -> Any:
        held.append(sum(t.nbytes for kept in flight.kept.values() for t in kept.tensors if t is not kept.held))
        return backward(programs, flight, *rest)

    monkeypatch.setattr(GroupPrograms, "backward", counted)
    parallel = {"dp": 2, "ep": 2, "recompute_layers": 1}
    train = {"steps": 1, "micro_batches": 2, "micro_batch": 1, "dtype": "bfloat16"}
    config = tiny(tmp_path, model=with_experts("qwen3_moe"), train=train, schedule={"warmup_steps": 1})
    trained(config, parallel, "O2", [])
    told = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})
    assert len(held) == 2
    assert sum(held) == sum(level_reports(told, config.model, rank, ["O2"])[0].experts for rank in (0, 1)) > 0


def test_a_pipelines_memory_is_for_as_many_micro_batches_as_are_told_to_be_in_flight(
    tiny: Tiny, tmp_path: Path
) -> None:
    """The pools after a step, against what the dry-run says of the table; bytes too."""
    parallel = {"pp": 2, "schedule": "zb-h1", "recompute_per_stage": [1, 0]}
    config = tiny(tmp_path / "run", model=MODEL, train={**TRAIN, "micro_batches": 6})
    told = config.model_copy(update={"parallel": config.parallel.model_copy(update=parallel)})

    def work(mesh: Mesh) -> tuple[int, int, int]:
        trainer = Trainer(config, mesh=mesh, parallel=parallel, compile={"level": "O2"})
        trainer.fit()
        ((group,),) = (groups.values() for groups in trainer.run.engine.level._groups.values())
        pools = group._pool.free
        assert len(pools["kept"]) >= len(pools["later"]) > 0
        return len(pools["kept"]), pools["kept"][0].nbytes, pools["later"][0].nbytes

    for rank, (count, kept, later) in enumerate(on_threads(MeshShape(pp=2), work)):
        (report,) = level_reports(told, config.model, rank, ["O2"])
        assert (report.in_flight, report.kept, report.later) == (count, kept, later)
    assert report.calls.keys() == {"forward", "backward", "weight gradients"}


def test_weights_of_the_next_layer_are_gathered_while_one_computes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, Any]] = []
    begin, run = WeightStore.begin, StepProgram.run

    def begun(store: WeightStore, unit: str) -> None:
        if store.shards.axis.index == 0 and unit not in store._begun and not store._open[unit]:
            events.append(("gather", unit))
        begin(store, unit)

    def ran(program: StepProgram, flight: Flight, extra: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        store = program.made.store
        if store is not None and store.shards.axis.index == 0:
            events.extend(("compute", unit) for unit in program.units[:1])  # a tied head has two
        return run(program, flight, extra)

    monkeypatch.setattr(WeightStore, "begin", begun)
    monkeypatch.setattr(StepProgram, "run", ran)
    train = {"steps": 1, "micro_batches": 2}
    trained(tiny(tmp_path, model=MODEL, train=train, schedule={"warmup_steps": 1}), {"dp": 2, "fsdp": 3}, "O2", [])
    order = [unit for what, unit in events if what == "compute"]
    layers = [f"layers.{i}" for i in range(4)]
    assert order == ["embed", *layers, "head", *layers[::-1]]
    for one, after in [*itertools.pairwise(order[:6]), *itertools.pairwise(order[6:])]:
        assert events.index(("gather", after)) < len(events) - 1 - events[::-1].index(("compute", one)), (one, after)


FROZEN = {
    "the tied embedding, of two stages": ({"pp": 2, "schedule": "zb-v"}, ["embed.weight", "layers.3.mlp.up.weight"]),
    "norm and a layer, weights sharded": ({"dp": 2, "fsdp": 3}, ["norm.weight", "layers.0.attn.q.weight"]),
}


@pytest.mark.parametrize("name", FROZEN)
def test_parameters_may_be_frozen_in_the_middle(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    parallel, names = FROZEN[name]

    def freezing(engine: type) -> Any:
        plain = engine.gradient

        def gradient(self: Any, batches: Any, *rest: Any) -> Any:
            if self.step_number == 1:
                for one in names:
                    if one in self.parameters:
                        self.parameters[one].requires_grad_(False)
            self.step_number += 1
            return plain(self, batches, *rest)

        monkeypatch.setattr(engine, "step_number", 0, raising=False)
        monkeypatch.setattr(engine, "gradient", gradient)

    freezing(OneProcess)
    freezing(OnMesh)
    train = {"micro_batches": 4, "dtype": "bfloat16"}
    config, notes = functools.partial(tiny, model=MODEL, train={**TRAIN, **train}), list[str]()
    expected = trained(config(tmp_path / "alone"), {}, "O0", [])
    for level in ("O0", *LEVELS):
        same(trained(config(tmp_path / level), parallel, level, notes), expected)
    assert not [note for note in notes if "O0" in note]
    assert len([note for note in notes if "changed after it was compiled" in note]) == 2


def test_where_one_rank_cannot_be_compiled_all_run_operator_by_operator(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = mesh_level.LevelOnMesh._programs

    def second_fails(level: mesh_level.LevelOnMesh, compiler: Compiler) -> None:
        if level.mesh.rank == 1:
            raise CannotCompile("not here")
        plain(level, compiler)

    monkeypatch.setattr(mesh_level.LevelOnMesh, "_programs", second_fails)
    config, notes = functools.partial(tiny, model=MODEL, train={**TRAIN, "canonical_tp": 2}), list[str]()
    expected = trained(config(tmp_path / "alone"), {}, "O0", [])
    same(trained(config(tmp_path / "mesh"), {"pp": 2}, "O2", notes), expected)
    assert [note for note in notes if "O0" in note] == [
        "compile.level O2 is not possible here, so operators run one by one (O0): rank 1 could not be compiled"
    ]


def test_ranks_whose_programs_begin_their_messages_in_different_orders_run_operator_by_operator(
    tiny: Tiny, tmp_path: Path, alone: Callable[..., State], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Compiler, "messages", lambda compiler: threading.get_ident())  # a rank is a thread here
    train, notes = {**TRAIN, "dtype": "float32", "canonical_tp": 2}, list[str]()
    found = trained(tiny(tmp_path, model=MODEL, train=train), {"tp": 2}, "O2", notes)
    same(found, alone(MODEL, train))
    (line,) = [note for note in notes if "O0" in note]
    assert "the programs of the ranks along tp begin their messages in different orders" in line
