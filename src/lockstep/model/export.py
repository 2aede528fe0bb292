"""A model out: a Hugging Face directory that `load` and `transformers` read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.model.families import FAMILIES, check, hf_names
from lockstep.model.files import new_directory, write_json
from lockstep.model.hf_config import write_config
from lockstep.model.linear import Linear
from lockstep.model.lora import merged_weight
from lockstep.model.weights import write_safetensors

if TYPE_CHECKING:
    from lockstep.model.model import Model

SHARD_BYTES = 5 * 2**30
"""Weights above this many bytes are spread over several files."""


def save_model(model: Model, path: str | Path, force: bool = False, shard_bytes: int = SHARD_BYTES) -> None:
    """Write config.json, generation_config.json, weights in the compute dtype, and the tokenizer's files.

    Adapters are merged into their weights. Raises LockstepError for a target that is no earlier export, or
    a disk that refuses; nothing is half written then.
    """
    check(model.config)
    config = model.config
    if model.has_tokenizer:
        own = model.tokenizer
        config = config.model_copy(update={
            "bos_id": own.bos_id if config.bos_id is None else config.bos_id,
            "eos_ids": tuple(sorted(own.eos_ids)) or config.eos_ids,
            "pad_id": own.pad_id if config.pad_id is None else config.pad_id,
        })  # fmt: skip
    raw = write_config(config, str(model.dtype).removeprefix("torch."))
    with new_directory(path, "model", force) as directory:
        write_json(directory / "config.json", raw)
        ids = {key: raw[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if raw[key] is not None}
        write_json(directory / "generation_config.json", ids)
        if model.has_tokenizer:
            model.tokenizer.save(directory)
        write_safetensors(directory, _tensors(model), shard_bytes)


def _tensors(model: Model) -> dict[str, Tensor]:
    """Hugging Face name -> CPU tensor in the compute dtype, adapters merged; a tied head is not repeated."""
    found: dict[str, Tensor] = {}
    for module_name, module in model.decoder.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if ".lora" in module_name:
                continue
            merge = leaf == "weight" and isinstance(module, Linear)
            tensor = merged_weight(module) if merge else parameter.detach()
            dtype = torch.float32 if leaf in getattr(module, "float32", ()) else model.dtype
            found[f"{module_name}.{leaf}"] = tensor.to("cpu", dtype).contiguous()
    names = hf_names(list(found), FAMILIES[model.config.family])
    return {names[name]: tensor for name, tensor in found.items()}
