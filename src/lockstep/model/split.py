"""Which linear layers tensor parallelism cuts, and along which of their widths (Megatron-LM, arXiv 1909.08053)."""

from __future__ import annotations

from lockstep.ops.operators import Split

SPLITS: dict[str, Split] = {
    "attn.q": "columns", "attn.k": "columns", "attn.v": "columns", "attn.o": "rows",
    "mlp.gate": "columns", "mlp.up": "columns", "mlp.down": "rows",
}  # fmt: skip
"""By module within a layer. columns: of the output's width (heads, the MLP's width); rows: of the input's."""


def split_of(module: str) -> Split | None:
    """How the linear layer of this name (``layers.3.attn.q``) is cut; None: it is not."""
    _, _, inner = module.partition("layers.")
    return SPLITS.get(inner.partition(".")[2])
