"""What cannot be computed is refused in a sentence: no kernel follows a wrong number into memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.ops import PAGE, AdamWFactors, KVPages, LatentPages, Packed, Paged, Routing, fused, operators
from lockstep.ops.gated import activation
from lockstep.ops.linear import pack
from tests.ops.compare import randn

OPS, RAW = operators("bitwise"), torch.ops.lockstep
BF16, F32 = torch.bfloat16, torch.float32


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def heads(rows: int = 4, q: int = 2, kv: int = 1, d: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    return randn(0, rows, q, d), randn(1, rows, kv, d), randn(2, rows, kv, d)


def packed(positions: Tensor, starts: Tensor, **how: Any) -> Tensor:
    return OPS.attention(*heads(), Packed(positions, starts), 0.3, **how)


def paged(positions: Tensor, starts: Tensor, table: Tensor, write: bool = False) -> Any:
    pages, batch = KVPages.zeros(3, 1, 16, torch.float32), Paged(positions, starts, table)
    q, k, v = heads(len(positions))
    return OPS.write_kv(k, v, pages, batch) if write else OPS.paged_attention(q, pages, batch, 0.3)


def latents(table: Tensor) -> Tensor:
    pages, batch = LatentPages.zeros(3, 32, torch.float32), Paged(ints(0, 1), ints(0, 2), table)
    return OPS.latent_attention(randn(0, 2, 4, 32), pages, batch, 0.3, 16)


def given_back(x: Tensor) -> Tensor:
    """As a shard of a model lets go of what it has gathered."""
    x.untyped_storage().resize_(0)
    return x


BUFFER = randn(0, 256)
FOUR, ALL = ints(0, 1, 2, 3), ints(0, 4)
PAGES = ints(2, 1)[None]
NEGATIVE_PAGES = KVPages(torch._neg_view(torch.zeros(3, 1, 16, 64)), torch._neg_view(torch.zeros(3, 1, 64, 16)))
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    # Rows of a batch.
    "positions of another place": (lambda: packed(FOUR + 1000, ALL), "row 0 is token 0 .* but its position is 1000"),
    "negative positions": (lambda: packed(FOUR - 9, ALL), "its position is -9"),
    "starts beyond the rows": (lambda: packed(FOUR, ints(0, 9)), "starts go from 0 to 9 for 4 rows"),
    "starts short of the rows": (lambda: packed(FOUR, ints(0, 2)), "starts go from 0 to 2 for 4 rows"),
    "falling starts": (lambda: packed(FOUR, ints(0, 6, 2, 4)), "starts fall behind sequence 1"),
    "no starts": (lambda: packed(FOUR, ints()), r"starts: expected \[sequences \+ 1\], got \[0\]"),
    "starts of another type": (lambda: packed(FOUR, ALL.long()), "starts is int64: expected int32"),
    "window below 0": (lambda: packed(FOUR, ALL, window=-1), "window is -1: expected"),
    "soft cap below 0": (lambda: packed(FOUR, ALL, softcap=-1.0), "softcap is -1: expected"),
    "no key heads": (
        lambda: OPS.attention(*heads(kv=0), Packed(FOUR, ALL), 0.3), "2 heads do not divide into 0 kv heads",
    ),
    "heads that do not divide": (
        lambda: OPS.attention(*heads(q=3, kv=2), Packed(FOUR, ALL), 0.3), "3 heads do not divide into 2 kv heads",
    ),
    # Pages.
    "a page that is not there": (lambda: paged(FOUR, ALL, ints(3)[None]), "page 3 of sequence 0 is not one of 3"),
    "a page to write that is not there": (lambda: paged(FOUR, ALL, ints(-1)[None], True), "page -1 of sequence 0"),
    "a page to read that is not there": (
        lambda: paged(FOUR + PAGE, ALL, ints(9, 0)[None]), "page 9 of sequence 0 is not one of 3",
    ),
    "positions beyond the table": (lambda: paged(FOUR + 3 * PAGE, ALL, PAGES), "positions 192 to 195 of sequence 0"),
    "positions with a gap": (lambda: paged(ints(0, 1, 3), ints(0, 3), PAGES), "position 3 .* does not follow 1"),
    "negative positions in pages": (lambda: paged(FOUR - 2, ALL, PAGES, True), "positions -2 to 1 of sequence 0"),
    "no row of the table": (lambda: paged(FOUR, ALL, PAGES[:0]), "a row for each of 1 sequences, got"),
    "a flat table": (lambda: paged(FOUR, ALL, PAGES[0]), "a row for each of 1 sequences, got"),
    "latents of a page that is not there": (lambda: latents(ints(7)[None]), "page 7 of sequence 0 is not one of 3"),
    "values of other rows": (
        lambda: fused.rope_write_kv(
            randn(0, 4, 1, 16), randn(1, 2, 1, 16), randn(2, 9, 8, 2), KVPages.zeros(3, 1, 16, torch.float32),
            Paged(FOUR, ALL, PAGES),
        ), r"v: expected \[4, 1, 16\], got \[2, 1, 16\]",
    ),
    # Shapes and types.
    "rows in two dimensions": (lambda: OPS.linear(randn(0, 2, 3, 3), randn(1, 5, 3)), "expected 2 dimensions, got"),
    "panels of another width": (
        lambda: RAW.gemm(randn(0, 2, 3), randn(1, 1, 3, 8), 5, None, torch.float32), "product of .* with packed",
    ),
    "gate and up of other heights": (
        lambda: fused.linear_gated(randn(0, 2, 3), *(pack(randn(1, n, 3), F32) for n in (20, 24)), "silu"),
        "linear_gated was given weights of 20 and 24 rows",
    ),
    "plain gate and up of other heights": (
        lambda: fused.linear_gated(randn(0, 2, 3), randn(1, 20, 3), randn(1, 24, 3), "silu"), "of 20 and 24 rows",
    ),
    "experts of other heights": (
        lambda: OPS.grouped_linear(randn(0, 4, 3), [pack(randn(1, n, 3), F32) for n in (20, 24)], ints(0, 2, 4)),
        "grouped_linear was given weights of 20 and 24 rows",
    ),
    "gates and ups of other heights": (
        lambda: OPS.grouped_gated(
            randn(0, 4, 3), *([pack(randn(1, n, 3), F32)] * 2 for n in (20, 24)), ints(0, 2, 4), "silu"
        ), "grouped_gated was given weights of 20 and 24 rows",
    ),
    "weights of which one is packed": (
        lambda: OPS.grouped_linear(randn(0, 4, 3), [randn(1, 20, 3), pack(randn(1, 20, 3), F32)], ints(0, 2, 4)),
        "packed and plain weights together",
    ),
    "a balance of no layers": (lambda: OPS.balance_loss([], []), "logits of 0 layers"),
    "a balance with offsets of one layer too few": (lambda: OPS.balance_loss([randn(0, 2, 3)], []), "offsets of 0"),
    "lengths that are no whole numbers": (lambda: Packed.of([2.5, 3]), "lengths are .2.5, 3.: expected whole numbers"),
    "a packed weight of another type": (
        lambda: OPS.linear(randn(0, 2, 3).bfloat16(), pack(randn(1, 5, 3), F32)), "packed is float32: expected bf",
    ),
    "half precision": (lambda: OPS.linear(randn(0, 2, 3).half(), randn(1, 5, 3)), "compute dtype is float16: expected"),
    "half precision of all": (lambda: OPS.log_softmax(randn(0, 2, 3).half()), "is float16: expected float32"),
    "a weight in half precision": (lambda: OPS.linear(randn(0, 2, 3), randn(1, 5, 3).half()), "source is float16"),
    "double precision": (lambda: OPS.rms_norm(randn(0, 2, 3).double(), randn(1, 3), 1e-5), "float32 or bfloat16"),
    "rows of nothing": (lambda: OPS.rms_norm(randn(0, 5, 0), randn(1, 0), 1e-5), "rows without an element"),
    "a rotary table without sines": (lambda: OPS.rope(randn(0, 4, 1, 16), FOUR, randn(1, 9, 8)), "rotary table"),
    "an activation that there is not": (lambda: OPS.gated(randn(0, 2, 3), randn(1, 2, 3), "relu"), "activation is 're"),
    "another activation that there is not": (lambda: activation(randn(0, 2, 3), "tanh"), "activation is 'tanh'"),
    "logits in three dimensions": (lambda: OPS.log_softmax(randn(0, 2, 3, 4)), "logits: expected 2 dimensions"),
    "no vocabulary": (
        lambda: OPS.linear_cross_entropy(randn(0, 4, 3), randn(1, 0, 3), torch.zeros(4).long(), torch.ones(4)),
        "hidden .* with a weight",
    ),
    "a target beyond the vocabulary": (
        lambda: OPS.linear_cross_entropy(randn(0, 1, 3), randn(1, 5, 3), torch.tensor([5]), torch.ones(1)),
        "token 5 is not in the vocabulary of 5",
    ),
    "tokens that are no numbers": (lambda: OPS.embedding(torch.tensor([0.5]), randn(1, 5, 3), BF16), "tokens are"),
    "targets that are no numbers": (
        lambda: OPS.linear_cross_entropy(randn(0, 1, 3), randn(1, 5, 3), torch.tensor([0.5]), torch.ones(1)),
        "targets are torch.float32",
    ),
    "a soft cap below 0": (
        lambda: OPS.linear_cross_entropy(
            randn(0, 1, 3), randn(1, 5, 3), torch.tensor([0]), torch.ones(1), 0.0, -1.0
        ), "softcap is -1",
    ),
    "a soft cap of nothing": (lambda: OPS.softcap(randn(0, 2, 3), 0.0), "softcap is 0"),
    "moments of another size": (
        lambda: OPS.adamw(randn(0, 3), randn(1, 4), randn(2, 3), randn(3, 3), AdamWFactors(*[0.5] * 9)),
        r"have \[3\], \[4\], \[3\] and \[3\]",
    ),
    "heads in two dimensions": (
        lambda: OPS.attention(randn(0, 4, 16), randn(1, 4, 16), randn(2, 4, 16), Packed(FOUR, ALL), 0.3),
        "keys: expected 3 dimensions",
    ),
    "numerics that there are not": (lambda: operators("exact"), "numerics is 'exact'"),  # type: ignore[arg-type]
    "a format that there is not": (
        lambda: OPS.dequantize(torch.zeros(34, dtype=torch.uint8), "Q9_9", torch.empty(32)), "format is 'Q9_9'",
    ),
    "a negative token": (lambda: OPS.embedding(torch.tensor([-1]), randn(1, 5, 3), BF16), "token -1 is not in the"),
    # Memory.
    "a weight without memory": (lambda: OPS.linear(randn(0, 2, 3), randn(1, 5, 3).to("meta")), "on the meta device"),
    "a gradient without memory": (
        lambda: OPS.adamw(randn(0, 3), randn(1, 3).to("meta"), randn(2, 3), randn(3, 3), AdamWFactors(*[0.5] * 9)),
        "adamw: an argument is on the meta device",
    ),
    "memory that was given back": (lambda: OPS.log_softmax(given_back(randn(0, 2, 3))), r"\[2, 3\] whose memory was"),
    "a result over an argument": (
        lambda: RAW.log_softmax.out(BUFFER[:6].view(2, 3), out=BUFFER[3:9].view(2, 3)), "out lies in the memory of",
    ),
    "a sum over a factor": (
        lambda: RAW.gemm_transposed_add(BUFFER.view(16, 16), randn(0, 1, 16, 16), BUFFER.view(16, 16)),
        "sum lies in the memory of a,",
    ),
    "results over one another": (
        lambda: RAW.gated_backward.out(*[randn(i, 2, 3) for i in range(3)], 0, out0=BUFFER[:6].view(2, 3),
                                       out1=BUFFER[:6].view(2, 3)), "out0 lies in the memory of out1",
    ),
    "a sum that is the negative of its memory": (
        lambda: RAW.gemm_transposed_add(randn(0, 16, 16), randn(1, 1, 16, 16), torch._neg_view(randn(2, 16, 16))),
        r"gemm_transposed_add: sum is written, but it is the negative of its memory.*resolve_neg\(\)",
    ),
    "pages that are the negative of their memory": (
        lambda: OPS.write_kv(*heads()[1:], NEGATIVE_PAGES, Paged(FOUR, ALL, PAGES)), "k_pages is written, but it is",
    ),
    # Experts.
    "more experts than there are": (lambda: OPS.route(randn(0, 3, 4), Routing(5)), "5 of 4 experts"),
    "groups that do not divide": (lambda: OPS.route(randn(0, 3, 4), Routing(1, groups=3)), "4 experts do not divide"),
    "scores that there are not": (lambda: Routing(1, "tanh"), "scoring is 'tanh'"),  # type: ignore[arg-type]
    "no expert": (lambda: OPS.grouped_linear(randn(0, 3, 4), [], ints(0)), "with no expert"),
    "no expert, raw": (lambda: RAW.grouped_product(randn(0, 3, 4), ints(0), [], False), "with no expert"),
    "offsets beyond the rows": (
        lambda: OPS.grouped_linear(randn(0, 3, 4), [randn(1, 5, 4)], ints(0, 9)), "offsets from 0 to 9 for 3 rows",
    ),
    "experts of several sizes": (
        lambda: OPS.grouped_linear(randn(0, 3, 4), [randn(1, 5, 4), randn(1, 6, 4)], ints(0, 1, 3)), "of 5 and 6 rows",
    ),
    "blocks of no values": (
        lambda: RAW.dequantize(torch.zeros(34, dtype=torch.uint8), 8, 34, 0, torch.empty(32)), "are not the blocks of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused(name: str) -> None:
    call, message = WRONG[name]
    with pytest.raises((RuntimeError, LockstepError), match=message):
        call()


def test_a_packed_form_of_wrong_lengths_is_refused() -> None:
    for lengths in ([3, -1], [2, 0]):
        with pytest.raises(
            LockstepError, match=r"lengths are \[.*\]: expected whole numbers; a sequence has at least one token"
        ):
            Packed.of(lengths)


def test_a_second_derivative_is_refused() -> None:
    """Recorded, a backward pass would look like a constant to autograd: wrong in silence."""
    x, w = randn(0, 5, 16).requires_grad_(), randn(1, 7, 16).requires_grad_()
    targets = torch.arange(5)
    for y in (
        OPS.linear(x, w).sum(), OPS.rms_norm(x, w[0], 1e-5).sum(), OPS.gated(x, x, "silu").sum(),
        fused.linear_gated(x, w, w, "silu").sum(), OPS.linear_cross_entropy(x, w, targets, torch.ones(5))[0],
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match="create_graph=True asks for the gradient of a gradient"):
            torch.autograd.grad(y, x, create_graph=True, retain_graph=True)
        torch.autograd.grad(y, x)


def test_what_has_no_gradient_says_so() -> None:
    x, w, wanted = randn(0, 4, 16), randn(1, 5, 16), randn(2, 4).abs().requires_grad_()
    for call in (
        lambda: OPS.linear_cross_entropy(x, w, torch.arange(4), wanted),
        lambda: OPS.rope(x[:, None], FOUR, randn(3, 9, 8, 2).requires_grad_()),
    ):
        with pytest.raises(RuntimeError, match="has no gradient"):
            call()


def test_functorch_is_refused() -> None:
    w = randn(1, 7, 16)
    for call in (
        lambda: torch.func.vmap(lambda x: OPS.linear(x, w))(randn(0, 3, 5, 16)),
        lambda: torch.func.grad(lambda x: OPS.linear(x, w).sum())(randn(0, 5, 16)),
        lambda: torch.func.jvp(lambda x: OPS.linear(x, w), (randn(0, 5, 16),), (randn(2, 5, 16),)),
    ):
        with pytest.raises(RuntimeError, match=r'torch.func .*operators."fast".$'):
            call()
