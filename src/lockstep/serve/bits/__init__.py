"""The bit contract, proved on a user's own model: every path against the training forward, as raw bytes."""

from lockstep.serve.bits.proof import Proof, prove
from lockstep.serve.bits.trace import Place

__all__ = ["Place", "Proof", "prove"]
