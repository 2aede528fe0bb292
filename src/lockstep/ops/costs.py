"""FLOPs and bytes of raw operators, from shapes alone: one table for the graph view, recomputation and the dry-run.

`cost(operator, args, kwargs, result)` takes real, meta or fake tensors, so it can be called from a
`TorchDispatchMode` as well as for the node of a graph. FLOPs count a multiplication and an addition as two, and one
for every other elementary function. Bytes are what the operator has to read and write once; caches are not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch._ops import OpOverload

from lockstep.ops.batch import PAGE


@dataclass(frozen=True)
class Cost:
    """flops: floating-point operations. read, written: bytes."""

    flops: float = 0.0
    read: int = 0
    written: int = 0

    @property
    def bytes(self) -> int:
        return self.read + self.written

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.read + other.read, self.written + other.written)


def cost(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Cost:
    """What one call of an operator costs. An operator that only makes a view costs nothing."""
    name = operator._schema.name
    if _is_view(operator) or name.rpartition("::")[2] in _ALLOCATE:
        return Cost()
    given = _by_name(operator, args, kwargs)
    flops = _FLOPS.get(name, _other_flops)
    read, written = _traffic(name, operator, given, result)
    return Cost(float(flops(given, result, operator)), read, written)


Named = dict[str, Any]
_ALLOCATE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}


def _product(a: Named, result: Any, operator: OpOverload) -> float:
    """gemm: a [m, k] times n columns."""
    rows, depth = a["a"].shape
    return 2.0 * rows * depth * int(a["n"])


def _gated_products(a: Named, result: Any, operator: OpOverload) -> float:
    """gemm_gated: two products, and their gate."""
    return 2 * _product(a, result, operator) + 6.0 * a["a"].shape[0] * int(a["n"])


def _active_product(a: Named, result: Any, operator: OpOverload) -> float:
    """gemm_activation: a product, its bias and its activation."""
    return _product(a, result, operator) + 6.0 * a["a"].shape[0] * int(a["n"])


def _three_products(a: Named, result: Any, operator: OpOverload) -> float:
    """gemm_three: three products of one a."""
    return 2.0 * a["a"].numel() * (int(a["n0"]) + int(a["n1"]) + int(a["n2"]))


def _product_and_sum(a: Named, result: Any, operator: OpOverload) -> float:
    """gemm_add: a product, and its sum with x."""
    return 2.0 * a["a"].numel() * a["x"].shape[1] + a["x"].numel()


def _grouped(a: Named, result: Any, operator: OpOverload) -> float:
    """grouped_gemm, grouped_product: each row [k] with one expert's weight of n columns."""
    return 2.0 * a["a"].numel() * int(a["n"] if "n" in a else a["weights"][0].shape[1 if a["by_rows"] else 0])


def _grouped_gated(a: Named, result: Any, operator: OpOverload) -> float:
    """grouped_gated, grouped_gated_product: two grouped products, and their gate."""
    n = int(a["n"] if "n" in a else a["gates"][0].shape[0])
    return 4.0 * a["a"].numel() * n + 6.0 * a["a"].shape[0] * n


def _grouped_gradient(a: Named, result: Any, operator: OpOverload) -> float:
    """grouped_weight_gradient: each row adds one outer product."""
    return 2.0 * a["dy"].numel() * a["x"].shape[1]


def _transposed(a: Named, result: Any, operator: OpOverload) -> float:
    """gemm_transposed: a [k, m], n columns of the sum."""
    depth, rows = a["a"].shape
    n = a["n"] if "n" in a else (a["sum"] if "sum" in a else a["out"]).shape[1]
    return 2.0 * rows * depth * int(n)


def _attention(passes: float) -> Callable[[Named, Any, OpOverload], float]:
    """Products of attention over the visible pairs; passes: 1 is two products (scores and their use of values)."""

    def flops(a: Named, result: Any, operator: OpOverload) -> float:
        _, heads, width = a["q"].shape
        values = int(a["v_dim"]) if "v_dim" in a else a["v" if "v" in a else "v_pages"].shape[-1]
        return passes * 2.0 * heads * (width + values) * _pairs(a)

    return flops


def _pairs(a: Named) -> float:
    """Pairs of query and key under the causal mask. Where lengths are not known (fake or meta `starts`), the rows are
    taken as one sequence, and pages as full: the most it can be."""
    rows, window = a["q"].shape[0], int(a.get("window", 0))
    if "table" in a:
        keys = a["table"].shape[1] * PAGE
        return float(rows) * (min(window, keys) if window else keys)
    lengths = [rows] if _hollow(a["starts"]) else a["starts"].diff().tolist()
    return sum(_causal(n, window) for n in lengths)


def _causal(length: int, window: int) -> float:
    seen = min(window or length, length)
    return seen * (seen + 1) / 2 + float(length - seen) * seen


def _hollow(x: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(x, FakeTensor) or x.is_meta


def _per_element(count: float, of: str) -> Callable[[Named, Any, OpOverload], float]:
    """`count` operations for every element of the argument `of`."""
    return lambda a, result, operator: count * a[of].numel()


def _loss(a: Named, result: Any, operator: OpOverload) -> float:
    """linear_cross_entropy: the logits, and one more product for each gradient that is asked for."""
    products = 1 + int(bool(a.get("hidden_gradient", True))) + int(bool(a.get("weight_gradient", True)))
    return 2.0 * products * a["hidden"].shape[0] * a["weight"].numel()


_FLOPS: dict[str, Callable[[Named, Any, OpOverload], float]] = {
    "lockstep::gemm": _product,
    "lockstep::gemm_transposed": _transposed,
    "lockstep::gemm_transposed_add": _transposed,
    "lockstep::gemm_gated": _gated_products,
    "lockstep::gemm_activation": _active_product,
    "lockstep::gemm_three": _three_products,
    "lockstep::gemm_add": _product_and_sum,
    "lockstep::grouped_gemm": _grouped,
    "lockstep::grouped_product": _grouped,
    "lockstep::grouped_gated": _grouped_gated,
    "lockstep::grouped_gated_product": _grouped_gated,
    "lockstep::grouped_weight_gradient": _grouped_gradient,
    "lockstep::attention_latent": _attention(1.0),
    "lockstep::attention_packed": _attention(1.0),
    "lockstep::attention_paged": _attention(1.0),
    "lockstep::attention_paged_int8": _attention(1.0),
    # The scores again, then the gradients of values, probabilities, queries and keys: five products for two.
    "lockstep::attention_backward": _attention(2.5),
    "lockstep::linear_cross_entropy": _loss,
    "lockstep_mesh::part_of_loss": _loss,
    "lockstep::rms_norm": _per_element(4, "x"),
    "lockstep::rms_norm_backward": _per_element(9, "x"),
    "lockstep::rms_norm_weight_gradient": _per_element(3, "x"),
    "lockstep::add_rms_norm": _per_element(5, "x"),
    "lockstep::add_rms_norm_backward": _per_element(10, "sum"),
    "lockstep::layer_norm": _per_element(7, "x"),
    "lockstep::layer_norm_backward": _per_element(12, "x"),
    "lockstep::add_layer_norm": _per_element(8, "x"),
    "lockstep::add_layer_norm_backward": _per_element(13, "sum"),
    "lockstep::rope": _per_element(3, "x"),
    "lockstep::norm_rope": _per_element(7, "x"),
    "lockstep::rope_write_kv": _per_element(3, "k"),
    "lockstep::activation": _per_element(5, "x"),
    "lockstep::activation_backward": _per_element(9, "x"),
    "lockstep::gated": _per_element(6, "gate"),
    "lockstep::gated_backward": _per_element(14, "gate"),
    "lockstep::adamw": _per_element(14, "p"),
    "lockstep::square_sum": _per_element(2, "x"),
    "lockstep::column_sums": _per_element(1, "x"),
    "lockstep::log_sum_exp": _per_element(3, "logits"),
    "lockstep::log_softmax": _per_element(4, "logits"),
    "lockstep::softcap": _per_element(6, "logits"),
    "lockstep::entropies": _per_element(5, "logits"),
    "lockstep::cross_entropy_backward": _per_element(3, "logits"),
    "lockstep::embedding_backward": _per_element(2, "dy"),
    "lockstep::pack_columns": _per_element(0, "source"),
    "lockstep::pack_rows": _per_element(0, "source"),
    "lockstep::write_kv": _per_element(0, "k"),
    "lockstep::write_latents": _per_element(0, "latents"),
    "lockstep::share_heads": _per_element(0, "x"),
    "lockstep::share_heads_backward": _per_element(1, "dy"),
    "lockstep::dispatch": _per_element(0, "x"),
    "lockstep::combine": _per_element(2, "y"),
}
"""Operations of the raw operators; rows of a norm or a softmax count their usual handful per element."""


def _other_flops(a: Named, result: Any, operator: OpOverload) -> float:
    """An operator that is not in the table: PyTorch's formula for products, else one operation per result element."""
    from torch.utils.flop_counter import flop_registry

    formula = flop_registry.get(operator.overloadpacket)
    if formula is not None:
        return float(formula(*a.values(), out_val=result))
    return float(sum(t.numel() for t in _tensors(result) if t.is_floating_point()))


_ROWS_ONLY = {
    "lockstep::embedding": {"weight": "tokens"},
    "aten::embedding": {"weight": "indices"},
    "aten::index_select": {"self": "index"},
}
"""Arguments of which only the rows that another argument names are read, each once."""


_PAGE_WRITES = {
    "lockstep::write_kv": ("k", "v"),
    "lockstep::write_kv_int8": ("k", "v"),
    "lockstep::rope_write_kv": ("k", "v"),
    "lockstep::write_latents": ("latents",),
}
"""Operators that put these arguments' rows into pages."""


def _traffic(name: str, operator: OpOverload, a: Named, result: Any) -> tuple[int, int]:
    """Bytes read and written. What is written in place counts once each way, pages only for the rows put in them."""
    if name in _PAGE_WRITES:
        rows = sum(_size(a[key]) for key in _PAGE_WRITES[name])
        return rows, rows
    targets = {x.name for x in operator._schema.arguments if x.alias_info is not None and x.alias_info.is_write}
    outs = {x.name for x in operator._schema.arguments if x.is_out}
    read = written = 0
    for key, value in a.items():
        for tensor in _tensors(value):
            few = _ROWS_ONLY.get(name, {}).get(key)
            rows = max(len(tensor), 1) if few is not None else 1
            size = _size(tensor) if few is None else min(a[few].numel(), rows) * _size(tensor) // rows
            read += 0 if key in outs else size
            written += size if key in targets else 0
    if not targets:
        written += sum(_size(tensor) for tensor in _tensors(result))
    return read, written


def _size(x: Tensor) -> int:
    return int(x.numel()) * x.element_size()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _by_name(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Named:
    names = [argument.name for argument in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_view(operator: OpOverload) -> bool:
    """Whether every result lies in an argument's memory and nothing is written."""
    schema = operator._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return False
    return bool(schema.returns) and all(r.alias_info is not None for r in schema.returns)
