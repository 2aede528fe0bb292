"""New weights for a served model, between two steps: what on-policy training needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor, nn

from lockstep.errors import LockstepError

if TYPE_CHECKING:
    from lockstep.model import Decoder, Model


def replace_weights(model: Model, state: Mapping[str, Tensor]) -> None:
    """Give the decoder these parameters, under the names of `model.decoder.named_parameters()`.

    Nothing is changed unless all of them fit. They are copied, in the dtype that the model keeps its weights in, so
    the result has the bits of a model loaded from them. Raises LockstepError that names the first misfit.
    """
    check_weights(model.decoder, state)
    put_weights(model.decoder, state)


def check_weights(decoder: Decoder, state: Mapping[str, Tensor]) -> None:
    """LockstepError that names the first misfit of names or shapes."""
    present = dict(decoder.named_parameters())
    missing, unknown = present.keys() - state.keys(), state.keys() - present.keys()
    if missing or unknown:
        what = f"{min(missing)} is missing" if missing else f"{min(unknown)} is not a parameter of this model"
        raise LockstepError(f"the new weights do not fit: {what}. Give exactly the decoder's named parameters.")
    for name, old in present.items():
        if state[name].shape != old.shape:
            raise LockstepError(
                f"the new weights do not fit: {name} is {list(state[name].shape)}, the model has {list(old.shape)}."
            )


def put_weights(decoder: Decoder, state: Mapping[str, Tensor]) -> None:
    """Copy these parameters, which fit, into the decoder, in the dtypes that it keeps."""
    # New tensors, not new values in the old ones: those may be views of a mapped file.
    kept = {name: old.dtype for name, old in decoder.named_parameters()}
    give_weights(decoder, {n: state[n].detach().to(dtype, copy=True).contiguous() for n, dtype in kept.items()})


def give_weights(decoder: Decoder, state: Mapping[str, Tensor]) -> None:
    """Let the decoder's parameters be these tensors themselves."""
    for name, old in dict(decoder.named_parameters()).items():
        owner, _, leaf = name.rpartition(".")
        parameter = nn.Parameter(state[name], requires_grad=old.requires_grad)
        setattr(decoder.get_submodule(owner), leaf, parameter)
