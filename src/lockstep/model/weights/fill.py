"""Stored tensors into a decoder's parameters, with every misfit named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model.decoder import Decoder
from lockstep.ops import Operators

_SHOWN = 5
_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""What weights are stored in; anything else needs scales, which are not read."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape, and how to read it. view: that gives a view of the mapped file, made at once.
    taken: what is read is not the whole tensor, but already the part's slice."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    view: bool = False
    taken: bool = False


class Part(Protocol):
    """What one of several processes holds of a model. config: of the whole; local: of its own decoder."""

    config: ModelConfig
    local: ModelConfig

    @property
    def place(self) -> str:
        """Which part it is of how many, in words; another for each."""

    def take(self, name: str, whole: Tensor) -> Tensor:
        """Its slice of a parameter of the whole model: a view."""

    def operators(self, ops: Operators) -> Operators:
        """The operators whose products reach across the processes."""


def fill(
    decoder: Decoder,
    found: Mapping[str, Stored],
    names: Mapping[str, str],
    dtype: torch.dtype,
    source: str,
    part: Part | None = None,
) -> set[str]:
    """Give every parameter of a decoder its stored tensor, in dtype; no copy where it has that dtype already.

    names: our parameter name -> name in the file. part: the decoder is the part's, and gets its slices.
    Gives the names of those that are no views of a mapped file.
    LockstepError where a tensor is missing, unknown, or of another shape than the configuration says.
    """
    check_fit(decoder if part is None else Decoder(part.config), found, names, source)
    made: set[str] = set()
    for prefix, module in decoder.named_modules():
        for leaf, parameter in module._parameters.items():
            if parameter is not None:
                ours = f"{prefix}.{leaf}"
                name = names[ours]
                tensor = found[name].read()
                if tensor.dtype not in _DTYPES:
                    raise LockstepError(
                        f"{source}: tensor {name} is {tensor.dtype}: quantised weights are read from .gguf files only; "
                        "give the model in bfloat16, float16 or float32"
                    )
                kept = torch.float32 if leaf in getattr(module, "float32", ()) else dtype
                if tensor.dtype != kept or not found[name].view:
                    made.add(ours)
                own = _taken(found[name], tensor, ours, part).to(kept)
                setattr(module, leaf, nn.Parameter(own, requires_grad=parameter.requires_grad))
    return made


def _taken(stored: Stored, tensor: Tensor, name: str, part: Part | None) -> Tensor:
    """The part's slice; copied where a view would keep memory of the whole tensor."""
    if part is None or stored.taken:
        return tensor
    own = part.take(name, tensor)
    return own if stored.view or own.shape == tensor.shape else own.clone()


def check_fit(decoder: Decoder, found: Mapping[str, Stored], names: Mapping[str, str], source: str) -> None:
    """LockstepError where a tensor is missing, unknown, or of another shape than the decoder's."""
    expected = {names[name]: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    _check_names(set(found), set(expected), decoder, source)
    for name, shape in expected.items():
        if found[name].shape != shape:
            raise LockstepError(
                f"{source}: tensor {name} has shape {list(found[name].shape)}, but the configuration expects "
                f"{list(shape)}; weights and configuration are of different models"
            )


def _check_names(found: set[str], expected: set[str], decoder: Decoder, source: str) -> None:
    missing = sorted(expected - found)
    if missing:
        raise LockstepError(f"{source}: {_list(missing)} missing; the file or directory is incomplete")
    unknown = sorted(name for name in found - expected if not _ignorable(name, decoder))
    if unknown:
        raise LockstepError(f"{source}: unexpected {_list(unknown)}; the configuration has no such weights")


def _ignorable(name: str, decoder: Decoder) -> bool:
    """A second copy of a tied head, frequencies that old files carry, and DeepSeek's layers for further tokens."""
    layer = name.split(".")[2] if name.startswith("model.layers.") else ""
    if decoder.config.family.startswith("deepseek") and layer.isdigit() and int(layer) >= decoder.config.num_layers:
        return True
    tied = decoder.config.tie_embeddings and name in ("lm_head.weight", "output.weight")
    return tied or name == "rope_freqs.weight" or name.endswith("rotary_emb.inv_freq")


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(names[:_SHOWN])}{more}"
