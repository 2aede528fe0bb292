"""AdamW against torch.optim.AdamW in float64, and its independence of threads and shards."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn

from lockstep.config import OptimizerConfig
from lockstep.errors import LockstepError
from lockstep.ops import Operators, operators
from lockstep.train.compiled import CompiledUpdate
from lockstep.train.optimizer import AdamW, clip_scale
from lockstep.train.tree import global_norm


def gradients(shapes: list[tuple[int, ...]], step: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(s, generator=generator, dtype=dtype) * 10.0**-step for s in shapes]


def test_equals_torch_in_float64() -> None:
    shapes = [(17, 9), (9,), (70_001, 1)]
    config = OptimizerConfig(lr=3e-3, weight_decay=0.2, beta2=0.99)
    ours = [torch.randn(s, dtype=torch.float64) for s in shapes]
    theirs = [nn.Parameter(p.clone()) for p in ours]
    decayed, rest = [p for p in theirs if p.dim() > 1], [p for p in theirs if p.dim() < 2]
    oracle = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}], betas=(0.9, 0.99), eps=1e-8
    )
    optimizer = AdamW({str(i): p for i, p in enumerate(ours)}, config, operators("fast"))
    for step in range(8):
        lr = 3e-3 / (step + 1)
        found = gradients(shapes, step, torch.float64)
        for group in oracle.param_groups:
            group["lr"] = lr
        for p, g in zip(theirs, found, strict=True):
            p.grad = g.clone()
        oracle.step()
        optimizer.step(found, lr)
    for a, b in zip(ours, theirs, strict=True):
        # The same formula with the factors grouped differently: a few units in the last place over 8 steps.
        torch.testing.assert_close(a, b.detach(), rtol=1e-12, atol=1e-14)


BITWISE = operators("bitwise")


def trained(threads: int, cuts: list[int], ops: Operators = BITWISE) -> Tensor:
    torch.set_num_threads(threads)
    start = torch.randn(200_003, generator=torch.Generator().manual_seed(0))
    parts = [p.clone().reshape(-1, 1) for p in start.tensor_split(cuts)]
    optimizer = AdamW({str(i): p for i, p in enumerate(parts)}, OptimizerConfig(), ops)
    for step in range(4):
        whole = gradients([(200_003,)], step, torch.float32)[0]
        optimizer.step([g.reshape(-1, 1) for g in whole.tensor_split(cuts)], 1e-3, scale=0.3)
    torch.set_num_threads(1)
    state = optimizer.state_dict()
    moments = [torch.cat([state[f"{kind}.{i}"] for i in range(len(parts))]) for kind in ("first", "second")]
    return torch.cat([*parts, *moments])


@pytest.mark.parametrize(("threads", "cuts"), [(2, []), (1, [5]), (2, [3, 1001, 77_777])])
def test_bits_do_not_depend_on_threads_or_shards(threads: int, cuts: list[int]) -> None:
    assert torch.equal(trained(threads, cuts), trained(1, []))


def test_the_kernel_has_the_bits_of_the_plain_form() -> None:
    assert torch.equal(trained(2, [3, 1001, 77_777]), trained(1, [], operators("fast")))


def test_norms_and_biases_do_not_decay() -> None:
    matrix, norm = torch.ones(2, 2), torch.ones(2)
    optimizer = AdamW({"matrix": matrix, "norm": norm}, OptimizerConfig(weight_decay=0.5), BITWISE)
    optimizer.step([torch.zeros(2, 2), torch.zeros(2)], lr=0.1)
    assert torch.equal(matrix, torch.full((2, 2), 1.0 - 0.1 * 0.5))
    assert torch.equal(norm, torch.ones(2))


def test_an_update_is_seen_by_caches_of_the_weight() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    before = weight._version
    AdamW({"w": weight}, OptimizerConfig(), BITWISE).step([torch.ones(3, 3)], lr=0.1)
    assert weight._version > before


def test_state_goes_out_and_in() -> None:
    def fresh() -> AdamW:
        return AdamW({"w": torch.ones(4, 4)}, OptimizerConfig(), BITWISE)

    one, two = fresh(), fresh()
    one.step([torch.full((4, 4), 0.3)], 0.1)
    two.parameters["w"].copy_(one.parameters["w"])
    two.load_state_dict(one.state_dict(), one.step_count)
    for optimizer in (one, two):
        optimizer.step([torch.full((4, 4), -0.2)], 0.1)
    assert torch.equal(one.parameters["w"], two.parameters["w"])


def test_moments_that_somebody_replaces_are_those_of_the_next_update() -> None:
    """As one program too, which holds tensors."""

    def found(compiled: bool) -> dict[str, Tensor]:
        parameters = {"w": torch.ones(4, 4), "b": torch.ones(4)}
        optimizer = AdamW(parameters, OptimizerConfig(), BITWISE)
        update = CompiledUpdate(optimizer) if compiled else optimizer.step
        for step in range(3):
            update(gradients([(4, 4), (4,)], step, torch.float32), 0.1, 1.0)
            if step == 0:
                optimizer.first["w"], optimizer.second["b"].data = torch.full((4, 4), 0.5), torch.full((4,), 0.25)
        return {**parameters, **optimizer.state_dict()}

    eager, program = found(False), found(True)
    assert all(torch.equal(eager[name], program[name]) for name in eager)


def test_moments_that_do_not_fit_are_named() -> None:
    optimizer = AdamW({"w": torch.ones(4, 3)}, OptimizerConfig(), BITWISE)
    wrong = (torch.zeros(3), torch.zeros(4, 3, dtype=torch.bfloat16), torch.zeros(3, 4).T)
    for update, moment in itertools.product((CompiledUpdate(optimizer), optimizer.step), wrong):
        optimizer.second["w"] = moment
        with pytest.raises(
            LockstepError, match=r"optimizer.second\['w'\] is .*: a moment is .* torch.float32 \[4, 3\]"
        ):
            update([torch.ones(4, 3)], 0.1, 1.0)


def test_a_parameter_that_is_not_contiguous_is_named() -> None:
    weight = torch.ones(4, 3)
    optimizer = AdamW({"layers.0.w": weight}, OptimizerConfig(), BITWISE)
    updates = (CompiledUpdate(optimizer), optimizer.step)
    weight.data = torch.ones(3, 4).T
    for update in updates:
        with pytest.raises(LockstepError, match=r"layers.0.w is not contiguous, \[4, 3\] with strides \(1, 4\)"):
            update([torch.ones(4, 3)], 0.1, 1.0)


def test_clipping() -> None:
    assert clip_scale(2.0, 1.0) == 0.5
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(2.0, 0.0) == 1.0
    g = [torch.full((100,), 3.0), torch.full((7, 7), -4.0)]
    scaled = [x * clip_scale(global_norm(g, BITWISE), 1.0) for x in g]
    assert global_norm(scaled, BITWISE) == pytest.approx(1.0, rel=1e-6)  # one float32 rounding per element
