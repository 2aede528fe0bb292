"""The output projection by parts of the vocabulary: each rank has some of its rows, the first gets all logits."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.model import Model
from lockstep.model.linear import WeightCache
from lockstep.parallel.collectives import Axis


class SharedHead:
    """A logit is a sum over the hidden width alone, so whoever computes it, it has the bits of `Decoder.head`."""

    def __init__(self, model: Model, axis: Axis) -> None:
        self._model, self._axis = model, axis
        self._packed = WeightCache(lambda ops, weight, dtype: ops.pack(self._part(weight), dtype))

    def prepare(self) -> None:
        """Pack this rank's rows, where not done yet."""
        self._packed.fill(self._model.decoder.head_weight, self._model.ops, self._model.dtype)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [R, D] -> logits float32 [R, V] on the first rank; on the others, which all must call it, a part."""
        model, axis = self._model, self._axis
        weight = self._packed.get(model.decoder.head_weight, model.ops, hidden.dtype)
        own = model.ops.linear(hidden, weight, None, out_dtype=torch.float32)
        if axis.index > 0:
            axis.send(own, 0).wait()
            return own
        widths = [part.shape[0] for part in model.decoder.head_weight.tensor_split(axis.size)]
        parts = [own, *(own.new_empty(len(own), width) for width in widths[1:])]
        for pending in [axis.receive(part, rank) for rank, part in enumerate(parts) if rank]:
            pending.wait()
        logits = torch.cat(parts, dim=1)
        cap = model.decoder.logit_softcap
        return model.ops.softcap(logits, cap) if cap else logits

    def _part(self, weight: Tensor) -> Tensor:
        return weight.tensor_split(self._axis.size)[self._axis.index]
