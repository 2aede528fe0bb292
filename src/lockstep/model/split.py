"""What of a layer parallelism cuts: linear layers along one of their widths (Megatron-LM, arXiv 1909.08053), experts
by their number."""

from __future__ import annotations

from lockstep.ops.operators import Split

SPLITS: dict[str, Split] = {
    "attn.q": "columns", "attn.k": "columns", "attn.v": "columns", "attn.o": "rows",
    "mlp.gate": "columns", "mlp.up": "columns", "mlp.down": "rows",
}  # fmt: skip
"""By module within a layer. columns: of the output's width (heads, the MLP's width); rows: of the input's."""


def expert_of(parameter: str) -> int | None:
    """The expert whose weight this is (``layers.3.mlp.experts.5.gate.weight``); None: it is no expert's."""
    _, found, rest = parameter.partition(".mlp.experts.")
    return int(rest.partition(".")[0]) if found else None


def split_of(module: str) -> Split | None:
    """How the layer of this name (``layers.3.attn.q``) is cut; None: it is not. ``embed`` and ``output``: by the tokens
    of the vocabulary."""
    if module in ("embed", "output"):
        return "vocabulary"
    _, _, inner = module.partition("layers.")
    return SPLITS.get(inner.partition(".")[2])
