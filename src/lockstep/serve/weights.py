"""New weights for a served model, between two steps: what on-policy training needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.model import Model


def replace_weights(model: Model, state: Mapping[str, Tensor]) -> None:
    """Give the decoder these parameters, under the names of `model.decoder.named_parameters()`.

    Nothing is changed unless all of them fit. They are copied, in the dtype that the model keeps its weights in, so
    the result has the bits of a model loaded from them. Raises LockstepError that names the first misfit.
    """
    present = dict(model.decoder.named_parameters())
    missing, unknown = present.keys() - state.keys(), state.keys() - present.keys()
    if missing or unknown:
        what = f"{min(missing)} is missing" if missing else f"{min(unknown)} is not a parameter of this model"
        raise LockstepError(f"the new weights do not fit: {what}. Give exactly the decoder's named parameters.")
    for name, old in present.items():
        if state[name].shape != old.shape:
            raise LockstepError(
                f"the new weights do not fit: {name} is {list(state[name].shape)}, the model has {list(old.shape)}."
            )
    for name, old in present.items():
        owner, _, leaf = name.rpartition(".")
        # A new parameter, not new values in the old one: that may be a view of a mapped file.
        new = nn.Parameter(state[name].detach().to(old.dtype, copy=True).contiguous(), requires_grad=old.requires_grad)
        setattr(model.decoder.get_submodule(owner), leaf, new)
