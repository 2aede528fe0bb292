"""LoRA: low-rank updates beside frozen linear layers, merged on export or kept apart in PEFT's format."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.errors import LockstepError
from lockstep.model.decoder import Decoder
from lockstep.model.families import FAMILIES, hf_names
from lockstep.model.files import new_directory, write_json
from lockstep.model.init import stream
from lockstep.model.linear import Linear, LoraPair
from lockstep.model.source import adapter_config
from lockstep.model.weights.safetensors_dir import save_tensors

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What can carry an adapter, by Hugging Face's (and PEFT's) names."""

_PREFIX = "base_model.model."
_WEIGHTS = "adapter_model.safetensors"


def add_lora(decoder: Decoder, rank: int, alpha: float, targets: Sequence[str] = TARGETS, seed: int = 0) -> None:
    """Freeze the decoder and put a float32 adapter beside every layer whose name is in targets.

    The output changes by alpha / rank * B (A x). A is uniform as PEFT draws it (Kaiming), B zero, so that the
    model's outputs are unchanged at first.
    """
    unknown = sorted(set(targets) - set(TARGETS))
    if unknown:
        raise LockstepError(f"lora.targets: unknown {', '.join(unknown)}; choose from {', '.join(TARGETS)}")
    if rank < 1:
        raise LockstepError(f"lora.rank: {rank} must be at least 1")
    layers = adaptable(decoder)
    absent = sorted(set(targets) - {name.rsplit(".", 1)[1] for name in layers})
    if absent:
        known = sorted(set(TARGETS) & {name.rsplit(".", 1)[1] for name in layers})
        experts = " (experts carry no adapters)" if decoder.config.num_experts else ""
        raise LockstepError(
            f"lora.targets: this model has no {', '.join(absent)} that can carry an adapter{experts}; "
            f"choose from {', '.join(known)}"
        )
    decoder.requires_grad_(False)
    for name, linear in layers.items():
        if name.rsplit(".", 1)[1] in targets:
            outputs, inputs = linear.weight.shape
            bound = inputs**-0.5
            a = torch.empty(rank, inputs).uniform_(-bound, bound, generator=stream(seed, f"{name}.lora_A"))
            linear.lora = LoraPair(a, torch.zeros(outputs, rank), alpha / rank)


def adaptable(decoder: Decoder) -> dict[str, Linear]:
    """Every layer of the blocks that can carry an adapter, by Hugging Face module name."""
    found = {f"{name}.weight": m for name, m in decoder.layers.named_modules(prefix="layers") if isinstance(m, Linear)}
    theirs = hf_names(list(found), FAMILIES[decoder.config.family])
    return {theirs[name].removesuffix(".weight"): linear for name, linear in found.items()}


def has_lora(decoder: Decoder) -> bool:
    return any(linear.lora is not None for linear in adaptable(decoder).values())


def merged_weight(linear: Linear) -> Tensor:
    """The weight with its adapter folded in, float32 [N, K]: W + scale * B A.

    B A is summed rank by rank, so that a merge has the same bits on every machine and under any numerics.
    """
    weight = linear.weight.detach()
    if linear.lora is None:
        return weight
    a, b = linear.lora.a.detach().float(), linear.lora.b.detach().float()
    update = torch.zeros(weight.shape)
    for r in range(len(a)):
        update += b[:, r, None] * a[r]
    return weight.float() + update * linear.lora.scale


def merge_lora(decoder: Decoder) -> None:
    """Fold every adapter into its weight (kept in the weight's dtype) and drop it."""
    for linear in adaptable(decoder).values():
        if linear.lora is not None:
            merged = merged_weight(linear).to(linear.weight.dtype)
            linear.weight = nn.Parameter(merged, requires_grad=linear.weight.requires_grad)
            linear.lora = None


def save_adapter(decoder: Decoder, path: str | Path, base: str, force: bool = False) -> None:
    """Write adapter_config.json and adapter_model.safetensors as `peft` reads them. base: the model underneath.

    All adapters must share one rank and scale, as those of `add_lora` do.
    """
    pairs = {name: linear.lora for name, linear in adaptable(decoder).items() if linear.lora is not None}
    shapes = {(pair.a.shape[0], pair.scale) for pair in pairs.values()}
    if len(shapes) != 1:
        raise LockstepError("this model carries no adapter to save: train it with lora.rank > 0, or save the model")
    ((rank, scale),) = shapes
    tensors: dict[str, Tensor] = {}
    for name, pair in pairs.items():
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = pair.a.detach().contiguous()
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = pair.b.detach().contiguous()
    config: dict[str, Any] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "bias": "none",
        "r": rank, "lora_alpha": scale * rank, "lora_dropout": 0.0, "inference_mode": True,
        "target_modules": sorted({name.rsplit(".", 1)[1] for name in pairs}),
    }  # fmt: skip
    with new_directory(path, "adapter", force) as directory:
        write_json(directory / "adapter_config.json", config)
        save_tensors(tensors, directory / _WEIGHTS)


def load_adapter(decoder: Decoder, path: str | Path) -> None:
    """Put the adapter of a PEFT directory onto a decoder. LockstepError for kinds of adapter that are not LoRA."""
    config, tensors = read_adapter(Path(path))
    file = Path(path) / _WEIGHTS
    layers = adaptable(decoder)
    for name in sorted({key.rsplit(".lora_", 1)[0] for key in tensors}):
        linear = layers.get(name.removeprefix(_PREFIX))
        if linear is None:
            raise LockstepError(f"{file}: adapter for {name}, which the base model does not have")
        a, b = (tensors.get(f"{name}.lora_{side}.weight", torch.empty(0)) for side in "AB")
        _check_shapes(a, b, linear, config, f"{file}: {name}")
        linear.lora = LoraPair(a.float(), b.float(), config["lora_alpha"] / config["r"])


def read_adapter(directory: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """adapter_config.json and the tensors of a PEFT directory, by their names there."""
    config = adapter_config(directory)
    try:
        return config, load_file(str(directory / _WEIGHTS))
    except (SafetensorError, OSError) as error:
        raise LockstepError(f"{directory / _WEIGHTS} is missing or damaged: {error}") from error


def _check_shapes(a: Tensor, b: Tensor, linear: Linear, config: dict[str, Any], name: str) -> None:
    outputs, inputs = linear.weight.shape
    expected = [(config["r"], inputs), (outputs, config["r"])]
    found = [tuple(a.shape), tuple(b.shape)]
    if found != expected:
        raise LockstepError(f"{name}: lora_A and lora_B have shapes {found}, expected {expected}")
