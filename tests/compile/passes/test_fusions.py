"""The fusions on the graphs of real blocks: which operators go, and that no byte of a result or gradient changes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, fx

from lockstep.compile.passes import PassContext, pipeline
from lockstep.compile.passes.fuse_branch import BRANCH
from lockstep.compile.passes.fuse_norm import NORM
from lockstep.compile.passes.fuse_products import PRODUCTS
from lockstep.compile.passes.fuse_rope import ROPE
from lockstep.compile.passes.join_products import JOINT
from lockstep.memory.arena import lower_bound, plan, without_reuse
from lockstep.memory.liveness import liveness
from lockstep.memory.overlap import check as check_arena
from lockstep.memory.recompute import RecomputePolicy
from lockstep.ops import operators
from tests.compile.passes.blocks import config, served, trained
from tests.compile.passes.graphs import capture, check

LLAMA, QWEN = config(), config(qk_norm=True, qkv_bias=True)
GEMMA = config(post_norms=True, norm_offset=1.0, activation="gelu_tanh", qk_norm=True)
FAMILIES = {"llama": LLAMA, "qwen": QWEN, "gemma": GEMMA}
F32 = torch.float32


def raw(module: fx.GraphModule) -> Counter[str]:
    names = [str(n.target).split(".")[1] for n in module.graph.nodes if str(n.target).startswith("lockstep.")]
    return Counter(names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, F32])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_trained_block_keeps_its_bytes_through_all_passes(name: str, dtype: torch.dtype) -> None:
    module, inputs = trained(FAMILIES[name], dtype)
    policy = RecomputePolicy("selective" if dtype == F32 else "none")
    for step in pipeline("O2"):
        check(step, module, inputs, forward_outputs=1, recompute=policy)
    found = raw(module)
    assert found["gemm_gated"] == 1
    assert found["gated"] == (policy.mode == "selective")  # computed again, from what is kept
    assert found["add_rms_norm"] >= 1
    assert found["add_rms_norm_backward"] >= 1


@pytest.mark.parametrize("name", FAMILIES)
def test_a_served_block_keeps_its_bytes_and_its_pages(name: str) -> None:
    module, inputs = served(FAMILIES[name])
    for step in pipeline("O2"):
        check(step, module, inputs)
    found = raw(module)
    assert (found["rope_write_kv"], found["write_kv"], found["gemm_gated"], found["gated"]) == (1, 0, 1, 0)
    assert (found["gemm_three"], found["gemm_add"]) == (1, 0 if FAMILIES[name].post_norms else 1)
    assert found["gemm"] == (2 if FAMILIES[name].post_norms else 1)  # what a norm takes stays a product of its own
    assert found["rope"] == (0 if FAMILIES[name].qk_norm else 1)
    assert found["norm_rope"] == (1 if FAMILIES[name].qk_norm else 0)


def test_products_keep_gate_and_up_only_where_the_backward_pass_reads_them() -> None:
    for graph, keep in ((trained(LLAMA), True), (served(LLAMA), False)):
        module, inputs = graph
        assert check(PRODUCTS, module, inputs).count == 1
        (call,) = [n for n in module.graph.nodes if "gemm_gated" in str(n.target)]
        assert call.args[-1] is keep
        assert call.meta["fused"][0] == "gate/up + gated activation"
        assert [v.shape[0] for v in call.meta["val"]] == [12, 12 * keep, 12 * keep]


def test_linear_and_activation() -> None:
    operators("bitwise")
    ops = torch.ops.lockstep

    def program(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return ops.activation(ops.gemm(x, ops.pack_columns(w, F32), 20, b, F32), 1)

    inputs = [torch.randn(7, 5), torch.randn(20, 5), torch.randn(20)]
    module = capture(program, *inputs)
    assert check(PRODUCTS, module, inputs).count == 1
    assert raw(module) == {"pack_columns": 1, "gemm_activation": 1}


def test_what_is_no_residual_stream_stays_apart_from_its_product() -> None:
    operators("bitwise")

    def program(x: Tensor, h: Tensor, w: Tensor) -> Tensor:
        return h + torch.ops.lockstep.gemm(x, torch.ops.lockstep.pack_columns(w, x.dtype), 20, None, x.dtype)

    half = [torch.randn(*shape).to(torch.bfloat16) for shape in ((7, 5), (7, 20), (20, 5))]
    changes = check(BRANCH, capture(program, *half), half)
    assert changes.count == 0
    assert "no float32 stream" in changes.notes[0]


def test_joint_products_of_one_dtype_only() -> None:
    operators("bitwise")

    def program(x: Tensor, w: Tensor) -> Tensor:
        packed = torch.ops.lockstep.pack_columns(w, x.dtype)
        return sum(torch.ops.lockstep.gemm(x, packed, 20, None, dtype) for dtype in (x.dtype, F32, x.dtype))

    half = [torch.randn(*shape).to(torch.bfloat16) for shape in ((7, 5), (20, 5))]
    changes = check(JOINT, capture(program, *half), half)
    assert changes.count == 0
    assert "another dtype" in changes.notes[0]


def test_products_decline_with_a_reason() -> None:
    operators("bitwise")
    ops = torch.ops.lockstep

    def apart(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
        packed = ops.pack_columns(w, F32)
        return ops.gated(ops.gemm(x, packed, 20, None, F32), ops.gemm(y, packed, 20, None, F32), 0)

    def biased(x: Tensor, y: Tensor, w: Tensor, b: Tensor) -> Tensor:
        packed = ops.pack_columns(w, F32)
        return ops.gated(ops.gemm(x, packed, 20, b, F32), ops.gemm(x, packed, 20, None, F32), 0)

    inputs = [torch.randn(7, 5), torch.randn(7, 5), torch.randn(20, 5), torch.randn(20)]
    for program, reason in ((apart, "different inputs"), (biased, "has a bias")):
        changes = check(PRODUCTS, capture(program, *inputs), inputs)
        assert changes.count == 0
        assert reason in changes.notes[0]


def test_the_residual_sum_stays_a_result() -> None:
    module, inputs = trained(LLAMA)
    changes = check(NORM, module, inputs)
    assert changes.count == 3  # forward: the second norm; backward: both
    calls = [n for n in module.graph.nodes if str(n.target).startswith("lockstep.add_rms_norm.")]
    assert len(calls) == 1


def test_sums_in_other_dtypes_stay_apart_from_their_norm() -> None:
    operators("bitwise")

    def program(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.lockstep.rms_norm(a + b, weight.to(torch.bfloat16), 1e-5, 0.0)[0]

    inputs = [torch.randn(7, 20), torch.randn(7, 20), torch.randn(20)]
    changes = check(NORM, capture(program, *inputs), inputs)
    assert changes.count == 0
    assert "no sum of a float32 stream" in changes.notes[0]


def test_rotary_fusions_decline_where_others_need_the_rotated_keys() -> None:
    module, inputs = trained(QWEN)
    assert check(ROPE, module, inputs).count == 2  # q and k, each with its head norm
    operators("bitwise")
    ops = torch.ops.lockstep
    served_module, served_inputs = served(LLAMA)
    rope = next(n for n in served_module.graph.nodes if "write_kv" in str(n.target)).args[0]
    output = served_module.graph.output_node()
    with served_module.graph.inserting_before(output):
        both = served_module.graph.call_function(ops.rope.default, (rope, *list(rope.args)[1:]))
    both.meta = dict(rope.meta)
    output.args = ((output.args[0], both),)
    served_module.recompile()
    changes = check(ROPE, served_module, served_inputs)
    assert changes.count == 0
    assert "is needed by" in changes.notes[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_block_s_arena_is_small_and_sound(name: str) -> None:
    module, _ = trained(FAMILIES[name])
    for step in pipeline("O2"):
        step.run(module, PassContext(1))
    buffers = liveness(module.graph).buffers
    arena = plan(buffers)
    assert check_arena(buffers, arena) == []
    assert arena.peak <= 1.05 * lower_bound(buffers)
    assert arena.peak <= 0.6 * without_reuse(buffers)
