"""Activation memory in closed form: what a layer keeps for its backward, and how many micro-batches are in flight.

For a GPT layer the formulas are those of Korthikanti et al. (Reducing Activation Recomputation, arXiv 2205.05198);
the same terms, counted one by one, give gated MLPs, grouped heads, flash attention and experts.
"""

from __future__ import annotations

from lockstep.errors import LockstepError
from lockstep.given import instance, whole
from lockstep.plan.layout import RECOMPUTE, Recompute


def activation_bytes(
    hidden: int,
    heads: int,
    seq: int,
    micro_batch: int,
    layers: int,
    *,
    tp: int = 1,
    pp: int = 1,
    chunks: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
) -> float:
    """Bytes of activations on a rank of the first stage of a GPT model under 1F1B, 16-bit, unfused attention.

    Per layer (arXiv 2205.05198, equations 1-4, table 2): ``s b h (10 + 24/t + 5 a s/(h t))``; with sequence parallelism
    the 10 is divided too; selective recompute drops the attention term; full recompute keeps ``2 s b h``. The first
    stage holds ``layers`` layers' worth whatever ``pp``, times ``1 + (p-1)/(p v)`` with ``chunks`` v > 1.
    """
    if recompute not in RECOMPUTE:
        raise LockstepError(f"recompute {recompute!r}: expected one of {', '.join(RECOMPUTE)}.")
    sizes = {"hidden": hidden, "heads": heads, "seq": seq, "micro_batch": micro_batch, "layers": layers}
    for name, value in (sizes | {"tp": tp, "pp": pp, "chunks": chunks}).items():
        whole(value, f"activation_bytes: {name}")
    instance(sequence_parallel, bool, "activation_bytes: sequence_parallel")
    unit = float(seq) * micro_batch * hidden
    if recompute == "full":
        per_layer = 2.0 * unit
    else:
        split = 10.0 / (tp if sequence_parallel else 1) + 24.0 / tp
        scores = 0.0 if recompute == "selective" else 5.0 * heads * seq / (hidden * tp)
        per_layer = unit * (split + scores)
    factor = 1.0 + (pp - 1) / (pp * chunks) if chunks > 1 else 1.0
    return per_layer * layers * factor
