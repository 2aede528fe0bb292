"""Stages: what is captured. A block, the embedding, the head with its loss; each is a function of tensors alone.

A stage of one kind is captured once, however many layers are of that kind. Its weights are inputs of the graph, so
that the same recipe serves every one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.compile.capture import ALL_ROWS, ANY, OWN, ROWS, CannotCompile, Function, Given
from lockstep.compile.describe import caches_of, describe, packable, shell
from lockstep.compile.own_code import OwnCode, is_ours
from lockstep.model.decoder import Block, Decoder
from lockstep.model.linear import _PackedWeight
from lockstep.model.moe import Routed, balance_loss
from lockstep.ops import Operators, Packed, Paged, Pages
from lockstep.ops.contiguous import not_contiguous
from lockstep.ops.row_share import RowShare


@dataclass(frozen=True)
class Stage:
    """A function to capture. key: a plain value, equal only for stages whose graphs are equal.

    function: makes the function to trace; called only where the stage must be captured, for it copies the module.
    whole: forward and backward run as one, with gradients of 1 coming in. leaves: a block's weights, the last given.
    early: how many of the gradients the backward gives, where those of weights come later (None: all). share: of the
    rows, which this rank has.
    """

    name: str
    key: Any
    given: tuple[Given, ...]
    function: Callable[[], Function]
    whole: bool = False
    leaves: tuple[Leaf, ...] = ()
    early: int | None = None
    share: RowShare = ALL_ROWS

    @property
    def grows(self) -> bool:
        """Whether its sizes depend on the number of rows."""
        return any(size in (ROWS, OWN) for one in self.given for size in one.shape)

    def deferring(self) -> Stage:
        """The same stage with the gradients of its weights to be computed later than that of its first input."""
        return replace(self, early=int(self.given[0].differentiated))


@dataclass(frozen=True)
class Leaf:
    """A weight of a stage: a parameter, or one field of a weight that is laid out for inference."""

    name: str
    tensor: Tensor
    field: str | None = None

    @property
    def given(self) -> Given:
        # All strides are zero where a weight is elsewhere until it is gathered for a run (`parallel.weight_store`).
        if any(self.tensor.stride()) and (wrong := not_contiguous(self.name, self.tensor)):
            raise CannotCompile(wrong)
        wanted = self.field is None and self.tensor.requires_grad and torch.is_grad_enabled()
        return Given(self.name, tuple(self.tensor.shape), self.tensor.dtype, wanted)


def leaves(module: nn.Module, ops: Operators, dtype: torch.dtype) -> list[Leaf]:
    """The weights that a stage reads: its parameters; without gradients, packed weights in the place of theirs."""
    parts = [] if torch.is_grad_enabled() else packable(module)
    packed = {f"{part}.weight": _packed(module, part, ops, dtype) for part in parts}
    found = []
    for name, parameter in module.named_parameters():
        laid_out = packed.get(name)
        if not laid_out:
            found.append(Leaf(name, parameter))
        else:
            found += [_within(cache, leaf) for cache, one in laid_out.items() for leaf in _laid_out(name, one)]
    return found


def _laid_out(name: str, packed: Any) -> list[Leaf]:
    """The tensors of a packed weight, or of one in segments, each packed: their fields are numbered."""
    if isinstance(packed, list):
        return [_within(str(i), leaf) for i, part in enumerate(packed) for leaf in _laid_out(name, part)]
    if not is_dataclass(packed):
        raise CannotCompile(f"{name} is laid out as {type(packed).__name__}, which a program cannot bind")
    return [Leaf(name, getattr(packed, f), f) for f in _tensor_fields(packed)]


def _within(what: str, leaf: Leaf) -> Leaf:
    return replace(leaf, field=f"{what}.{leaf.field}")


def _with_tensors(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A packed weight of these tensors, by their fields."""
    if not isinstance(packed, list):
        return replace(packed, **tensors)
    parts: list[dict[str, Tensor]] = [{} for _ in packed]
    for field, tensor in tensors.items():
        number, _, inner = field.partition(".")
        parts[int(number)][inner] = tensor
    return [_with_tensors(part, own) for part, own in zip(packed, parts, strict=True)]


def block_stage(
    block: Block,
    ops: Operators,
    batch: Packed | Paged,
    rope: Tensor,
    pages: Pages | None,
    dtype: torch.dtype,
    wanted: bool,
    routed: bool = False,
) -> Stage:
    """A transformer block: x, the batch's tensors, the rotary table, the pages' tensors, the weights -> x.

    wanted: whether x has a gradient. routed: what the router did (logits, offsets) is a result too, if there is one.
    """
    found = leaves(block, ops, dtype)
    width = block.attn_norm.weight.shape[0]
    x = Given("x", (OWN, width), torch.float32, wanted)
    turning = Given("rope", (ANY, *rope.shape[1:]), rope.dtype)
    given = (x, *_batch_given(batch), turning, *_pages_given(pages), *(leaf.given for leaf in found))
    parts, held = _count(batch), 0 if pages is None else _count(pages)

    def function() -> Function:
        hollow = shell(block)
        assert isinstance(hollow, Block)
        return lambda *tensors: run(hollow, *tensors)

    def run(hollow: Block, *tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors[1:])
        now = _with(batch, [next(rest) for _ in range(parts)])
        table = next(rest)
        here = None if pages is None else _with(pages, [next(rest) for _ in range(held)])
        with _weights(hollow, found, list(rest), ops, dtype, block):
            routes: list[Routed] | None = [] if routed else None
            x = hollow(ops, tensors[0], now, table, here, dtype, routes)
            return (x, *chain.from_iterable((one.logits, one.offsets) for one in routes or ()))

    key = _key("block", [describe(block), routed], ops, dtype, given)
    return Stage("block", key, given, function, leaves=tuple(found), share=ops.share)


def embedding_stage(decoder: Decoder, ops: Operators, dtype: torch.dtype) -> Stage:
    """tokens, weight -> the residual stream float32 [T, D]."""
    scale, weight = decoder.config.embedding_scale, Leaf("embed.weight", decoder.embed.weight)
    given = (Given("tokens", (ROWS,), torch.int64), weight.given)

    def run(tokens: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (ops.embedding(tokens, weight, dtype, scale).float(),)

    key = _key("embedding", [scale, ops.tokens_as], ops, dtype, given)
    return Stage("embedding", key, given, lambda: run, share=ops.share)


def loss_stage(decoder: Decoder, ops: Operators, dtype: torch.dtype, z_loss: float, wanted: bool) -> Stage:
    """x, targets, token weights, the norm's weight, the head's weight -> objective, log-probabilities, and the
    gradients of x and of both weights, all in one go."""
    norm, hollow = decoder.norm, shell(decoder.norm)
    weights = [Leaf("norm.weight", norm.weight), Leaf("head.weight", decoder.head_weight)]
    x = Given("x", (OWN, norm.weight.shape[0]), torch.float32, wanted)
    rows = (Given("targets", (ROWS,), torch.int64), Given("token_weights", (ROWS,), torch.float32))
    given = (x, *rows, *(leaf.given for leaf in weights))
    softcap = decoder.logit_softcap

    def run(x: Tensor, targets: Tensor, token_weights: Tensor, norm_weight: Tensor, head: Tensor) -> Any:
        hidden = torch.func.functional_call(hollow, {"weight": norm_weight}, (ops, x, dtype))
        return ops.linear_cross_entropy(hidden, head, targets, token_weights, z_loss=z_loss, softcap=softcap)

    key = _key("loss", [describe(norm), z_loss, softcap, ops.tokens_as], ops, dtype, given)
    return Stage("head", key, given, lambda: run, whole=True, share=ops.share)


def balance_stage(ops: Operators, dtype: torch.dtype, experts: int, wanted: Sequence[bool]) -> Stage:
    """The objective, the weight of the load-balance loss (scalars), then logits and offsets of every router -> the
    objective with that loss, and the gradients of the logits that are wanted (one entry for each router)."""
    scalars = [Given(name, (), torch.float32) for name in ("objective", "weight")]
    routers = [
        (Given("logits", (ROWS, experts), torch.float32, one), Given("offsets", (experts + 1,), torch.int32))
        for one in wanted
    ]
    given = (*scalars, *chain.from_iterable(routers))

    def run(objective: Tensor, weight: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        routed = [Routed(*pair) for pair in zip(tensors[::2], tensors[1::2], strict=True)]
        return (objective + weight * balance_loss(ops, routed),)

    return Stage("balance", _key("balance", [], ops, dtype, given), given, lambda: run, whole=True)


def norm_stage(decoder: Decoder, ops: Operators, dtype: torch.dtype) -> Stage:
    """x, the norm's weight -> the final hidden states [T, D]."""
    norm, hollow = decoder.norm, shell(decoder.norm)
    x = Given("x", (ROWS, norm.weight.shape[0]), torch.float32)
    given = (x, Leaf("norm.weight", norm.weight).given)

    def run(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (torch.func.functional_call(hollow, {"weight": weight}, (ops, x, dtype)),)

    return Stage("norm", _key("norm", describe(norm), ops, dtype, given), given, lambda: run)


class _weights:
    """Within, the hollow module computes with these tensors as its weights; without gradients also as packed ones."""

    def __init__(
        self, hollow: nn.Module, found: Sequence[Leaf], tensors: list[Tensor], ops: Operators, dtype: torch.dtype,
        real: nn.Module,
    ) -> None:  # fmt: skip
        self.hollow, self.parts = hollow, packable(hollow)
        self.ops, self.dtype, self.real = ops, dtype, real
        self.plain = {leaf.name: t for leaf, t in zip(found, tensors, strict=True) if leaf.field is None}
        self.packed: dict[str, dict[str, Tensor]] = {}
        for leaf, tensor in zip(found, tensors, strict=True):
            if leaf.field is not None:
                self.packed.setdefault(leaf.name.rpartition(".")[0], {})[leaf.field] = tensor

    def __enter__(self) -> None:
        from torch.nn.utils.stateless import _reparametrize_module

        self.swap = _reparametrize_module(self.hollow, self.plain)
        self.swap.__enter__()
        for name, tensors in self.packed.items():
            weight = self.hollow.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            for cache, real in _packed(self.real, name, self.ops, self.dtype).items():
                own = {f.removeprefix(f"{cache}."): t for f, t in tensors.items() if f.startswith(f"{cache}.")}
                self.parts[name][cache]._entry = _PackedWeight(
                    weight, weight._version, 0, self.ops.numerics, self.dtype, _with_tensors(real, own)
                )

    def __exit__(self, *error: Any) -> None:
        for name in self.packed:
            for cache in self.parts[name].values():
                cache.clear()
        self.swap.__exit__(*error)


def _packed(module: nn.Module, part: str, ops: Operators, dtype: torch.dtype) -> dict[str, Any]:
    """The weight of a part as it is laid out, by where that is kept; empty where nothing fits."""
    layer = module.get_submodule(part)
    assert isinstance(layer.weight, Tensor)
    return {
        name: cache._entry.packed
        for name, cache in caches_of(layer).items()
        if cache._entry is not None and cache._entry.fits(layer.weight, ops, dtype)
    }


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of a dataclass (a batch, pages, a packed weight), in the order of its fields."""
    return [getattr(value, name) for name in _tensor_fields(value)]


def _tensor_fields(value: Any) -> list[str]:
    return [f.name for f in fields(value) if isinstance(getattr(value, f.name), Tensor)]


def _with(value: Any, tensors: list[Tensor]) -> Any:
    return replace(value, **dict(zip(_tensor_fields(value), tensors, strict=True)))


def _count(value: Any) -> int:
    return len(_tensor_fields(value))


def _batch_given(batch: Packed | Paged) -> list[Given]:
    """Positions have a row each; of the other tensors no shape in the graph may depend."""
    return [
        Given(name, (ROWS,) if name == "positions" else (ANY,) * t.dim(), t.dtype)
        for name, t in zip(_tensor_fields(batch), tensors_of(batch), strict=True)
    ]


def _pages_given(pages: Pages | None) -> list[Given]:
    if pages is None:
        return []
    named = zip(_tensor_fields(pages), tensors_of(pages), strict=True)
    return [Given(f"pages.{name}", (ANY, *t.shape[1:]), t.dtype) for name, t in named]


def _key(name: str, what: Any, ops: Operators, dtype: torch.dtype, given: Sequence[Given]) -> Any:
    inputs = [[one.name, list(one.shape), str(one.dtype), one.differentiated] for one in given]
    share = [ops.share.members, ops.share.index, ops.share.rest, ops.share.step]
    return [name, what, ops.numerics, ops.cut_as, share, str(dtype), inputs, *_own_operators(ops)]


def _own_operators(ops: Operators) -> list[OwnCode]:
    """What a caller put in the place of an operator: a graph holds what it did."""
    calls = [call for call in vars(ops).values() if callable(call)]
    return [OwnCode(call) for call in calls if not is_ours(getattr(call, "func", call).__module__)]
