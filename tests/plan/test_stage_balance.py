"""Recomputation, offload and layers of each stage: by the memory of that stage, and faster than the same on all."""

from dataclasses import replace

import pytest

from lockstep.errors import LockstepError
from lockstep.plan import Batch, Layout, ModelShape, load_cluster, load_plan, predict, rank_memory, search
from lockstep.plan.refine import layers_of_chunks
from lockstep.plan.report import report
from lockstep.plan.stage_balance import _first

SHAPE = ModelShape("m", 24, 4096, 32, 32000, intermediate=14336, kv_heads=8, gated=True, tied=False)
BATCH = Batch(32, 8192)
ASKED = {"seq": BATCH.seq, "global_batch_tokens": BATCH.tokens}
PINS = {"pp": 4, "dp": 1, "cp": 1, "tp": 2, "micro_batch": 1, "schedule": "1f1b"}


def cluster(gb: float, host_gb: float = 0.0):
    """Eight devices with so much memory each, and beside it in the host behind a fast link."""
    place = load_cluster("8xH100")
    return replace(place, device=replace(place.device, memory_gb=gb, host_memory_gb=host_gb, host_gb_s=450.0))


@pytest.mark.parametrize("bend", [0.0, 0.3, 3.0])
def test_the_first_number_that_fits_is_found_in_few_looks(bend):
    """Along a line, and where the line bends."""
    for high in (1, 2, 20, 61):
        for first in range(1, high + 1):
            looks = set()

            def over(n, first=first, looks=looks):
                looks.add(n)
                return (first - n - 0.5) * (1 if n < first else 1 + bend)

            assert _first(high, over) == first
            assert len(looks - {0, high}) <= (2 if not bend else 3 + high.bit_length())


@pytest.fixture(scope="module")
def tight():
    """So little memory that the first stages must recompute: the plans, the best first."""
    return search(SHAPE, cluster(22), **ASKED, pins=PINS, top=10)


def test_only_the_first_stages_recompute_and_that_is_faster(tight):
    best = tight[0]
    again = best.layout.recomputed
    assert again[0] > 0
    assert again[-1] == 0
    assert list(again) == sorted(again, reverse=True)
    uniform = [plan for plan in tight if not plan.layout.by_stage]
    assert uniform, "the same on every stage is possible too"
    assert best.prediction.step_s < 0.99 * uniform[0].prediction.step_s


def test_every_stage_fits_and_recomputes_no_layer_more_than_it_must(tight):
    layout, room = tight[0].layout, cluster(22).device.capacity
    for stage, count in enumerate(layout.recomputed):
        assert rank_memory(SHAPE, layout, BATCH, stage * 2).peak <= room
        if count:
            less = tuple(n - (s == stage) for s, n in enumerate(layout.recomputed))
            assert rank_memory(SHAPE, replace(layout, recompute_per_stage=less), BATCH, stage * 2).peak > room
    fullest = max(rank_memory(SHAPE, layout, BATCH, stage * 2).peak for stage in range(4))
    assert tight[0].prediction.memory_gb == pytest.approx(fullest / 1e9)
    assert sum(tight[0].prediction.memory_parts.values()) == pytest.approx(tight[0].prediction.memory_gb)


def test_the_lists_are_in_the_file_and_in_the_report(tight, tmp_path):
    tight[0].save(tmp_path / "plan.yaml")
    assert load_plan(tmp_path / "plan.yaml").layout == tight[0].layout
    text = report(tight, cluster(22))
    assert f"recomputed per stage: {' '.join(map(str, tight[0].layout.recomputed))}" in text
    assert "/".join(map(str, tight[0].layout.recomputed)) in tight[0].layout.describe()


def test_more_memory_is_never_slower_where_an_even_cut_just_fits():
    """The even cut fits 30 GB as it is; a faster one, with fewer layers beside the head, still has to recompute one."""
    seconds = [search(SHAPE, cluster(gb), **ASKED, pins=PINS)[0].prediction.step_s for gb in (28, 30, 80)]
    assert seconds == sorted(seconds, reverse=True)


def test_a_prediction_by_stage_of_equal_stages_is_that_of_the_whole():
    same, each = Layout(pp=4, tp=2, recompute_layers=2), Layout(pp=4, tp=2, recompute_per_stage=(2, 2, 2, 2))
    a, b = (predict(SHAPE, layout, cluster(80), BATCH) for layout in (same, each))
    for part in set(a.parts) - {"bubble"}:  # one is simulated, the other a closed form for equal stages
        assert b.parts[part] == pytest.approx(a.parts[part])
    assert sum(b.parts.values()) == pytest.approx(b.step_s)


def test_offload_goes_before_recomputation_where_it_hides():
    best = search(SHAPE, cluster(22, host_gb=200.0), **ASKED, pins=PINS)[0].layout
    assert best.offloaded[0] > 0
    assert not any(best.recomputed)
    bare = search(SHAPE, cluster(22, host_gb=200.0), **ASKED, pins={**PINS, "offload_layers": 0})[0].layout
    assert not any(bare.offloaded)
    assert any(bare.recomputed)


@pytest.mark.parametrize("pin", [{"recompute": "full"}, {"recompute_layers": 5}])
def test_what_is_pinned_is_the_same_on_all_stages(pin):
    assert not any(plan.layout.by_stage for plan in search(SHAPE, cluster(22), **ASKED, pins={**PINS, **pin}))


def test_layers_of_a_stage_are_spread_over_its_chunks():
    layout = Layout(pp=2, schedule="zb-v", chunks=2, layers_per_stage=(13, 11))
    assert layers_of_chunks(layout, 24) == [[7, 6], [6, 5]]


def test_lists_of_another_length():
    with pytest.raises(LockstepError, match="must be 4 numbers each"):
        predict(SHAPE, Layout(pp=4, tp=2, recompute_per_stage=(1, 2)), cluster(80), BATCH)
