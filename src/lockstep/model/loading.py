"""One way in: a Hugging Face directory, a GGUF file, an adapter directory or an alias becomes a Model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model.decoder import Decoder, check_widths
from lockstep.model.families import FAMILIES, gguf_names, hf_names
from lockstep.model.files import read_json
from lockstep.model.hf_config import read_config
from lockstep.model.lora import load_adapter
from lockstep.model.model import Model
from lockstep.model.source import adapter_base, resolve, uncut_adapter
from lockstep.model.tokenizer import Tokenizer
from lockstep.model.weights import PackedCache, Part, Stored, fill, read_gguf, read_safetensors
from lockstep.model.weights.gguf_tokenizer import gguf_tokenizer
from lockstep.model.weights.packed import recorded
from lockstep.ops import Numerics, Operators, operators
from lockstep.ops.cut_vocabulary import in_segments
from lockstep.ops.linear import PackedWeight

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
"""Compute dtypes by name."""

MakePart = Callable[[ModelConfig], Part]
"""From a whole model's configuration; raises LockstepError where that cannot be cut."""


def load(
    path_or_alias: str | Path,
    dtype: str = "bfloat16",
    device: str = "cpu",
    numerics: Numerics = "bitwise",
    packed: PackedCache | None = None,
    part: MakePart | None = None,
) -> Model:
    """Load a model: a Hugging Face directory (safetensors), a .gguf file, a PEFT adapter directory, an alias, or the
    directory of a training run, of which the newest checkpoint is taken.

    dtype: compute dtype, "bfloat16" or "float32"; weights are kept in it. Weights that have it already are not
    copied: they stay views of the mapped file. numerics: "bitwise" (the contract's kernels) or "fast". packed: for a
    model that is to be served: its weights are packed, or taken from this cache (with numerics bitwise). part: load
    only what one of several processes holds of it.
    The tokenizer is read when it is first asked for. Raises LockstepError for a missing path, an unknown family,
    or weights that do not fit their configuration.
    """
    compute = _dtype(dtype)
    if torch.device(device).type != "cpu":
        raise LockstepError(f"device {device!r}: models run on the CPU in this version; leave device at 'cpu'")
    ops = operators(numerics)
    path = resolve(path_or_alias)
    if (path / "adapter_config.json").is_file():
        if part is not None:
            raise uncut_adapter(path)
        model = load(adapter_base(path), dtype, device, numerics, packed)
        load_adapter(model.decoder, path)
        return model
    source = _gguf(path, compute, ops) if path.is_file() else _directory(path)
    own = None if part is None else part(source.config)
    if numerics == "bitwise":
        check_widths(source.config)
    else:
        packed = None  # plain PyTorch packs nothing
    return _filled(source, path, compute, ops, packed, own)


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise LockstepError(f"dtype {name!r} is unknown; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


@dataclass(frozen=True)
class _Source:
    """A model's files, read as far as their headers. names: the decoder's parameter names, those of the tensors."""

    config: ModelConfig
    tensors: Mapping[str, Stored]
    names: Callable[[list[str]], dict[str, str]]
    tokenizer: Callable[[], Tokenizer] | None
    files: Sequence[Path]
    """Whose bytes decide the weights."""


def _gguf(file: Path, dtype: torch.dtype, ops: Operators) -> _Source:
    found = read_gguf(file, dtype, ops)
    has_tokenizer = "tokenizer.ggml.model" in found.metadata
    tokenizer = lambda: _checked(gguf_tokenizer(found.metadata, str(file)), found.config, file)  # noqa: E731
    return _Source(found.config, found.tensors, gguf_names, tokenizer if has_tokenizer else None, [file])


def _directory(directory: Path) -> _Source:
    config = read_config(read_json(directory / "config.json"), str(directory / "config.json"))
    files = sorted([directory / "config.json", *directory.glob("*.safetensors*")])
    has_tokenizer = (directory / "tokenizer.json").is_file()
    tokenizer = lambda: _checked(Tokenizer.from_dir(directory), config, directory)  # noqa: E731
    tensors, family = read_safetensors(directory), FAMILIES[config.family]
    return _Source(config, tensors, lambda ours: hf_names(ours, family), tokenizer if has_tokenizer else None, files)


def _filled(
    source: _Source, path: Path, dtype: torch.dtype, ops: Operators, packed: PackedCache | None, part: Part | None
) -> Model:
    """The model, or a part of it, with its weights; prepared for inference where there is a cache of packed ones."""
    decoder, place = Decoder(source.config if part is None else part.local), "" if part is None else part.place
    names = source.names([name for name, _ in decoder.named_parameters()])
    kept = None if packed is None else packed.load(path, source.files, dtype, place)
    tensors = source.tensors if kept is None else kept.over(source.tensors, names)
    made = fill(decoder, tensors, names, dtype, str(path), part)
    if kept is not None:
        decoder.prepare(_cut(kept.operators(ops), source.config, part), dtype)
    elif packed is not None:
        packs: list[PackedWeight] = []
        decoder.prepare(_cut(recorded(ops, packs), source.config, part), dtype)
        known = {name: value for name, value in decoder.named_parameters() if name in made}
        spare = {name: known.pop(name) for name in decoder.packed_names() if name in known}
        packed.store(path, source.files, dtype, packs, known, spare, place)
    return Model(decoder.eval(), source.tokenizer, _cut(ops, source.config, part), dtype)


def _cut(ops: Operators, config: ModelConfig, part: Part | None) -> Operators:
    """The operators of one device that holds the whole model, or of the part's."""
    return in_segments(ops, config.canonical_tp, config.vocab_size) if part is None else part.operators(ops)


def _checked(tokenizer: Tokenizer, config: ModelConfig, source: Path) -> Tokenizer:
    """Refuse a vocabulary larger than the embedding."""
    beyond = [tokenizer.token(i) for i in range(config.vocab_size, tokenizer.vocab_size)]
    if set(beyond) - FAMILIES[config.family].spare_tokens:
        raise LockstepError(
            f"{source}: the tokenizer has {tokenizer.vocab_size} tokens, but the embedding only {config.vocab_size} "
            f"rows (first token without one: {beyond[0]!r}); use the model's own tokenizer, or resize its embedding"
        )
    return tokenizer
