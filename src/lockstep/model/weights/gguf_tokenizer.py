"""The tokenizer in a GGUF file's metadata: byte-level BPE with its special tokens and chat template."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenizers import Tokenizer as Backend

from lockstep.errors import LockstepError
from lockstep.model.gguf_config import eos_ids
from lockstep.model.tokenizer import Tokenizer, byte_level

_SPLITS = {
    "default": "gpt-2",
    "gpt-2": "gpt-2",
    "smollm": "smollm",
    "llama-bpe": "llama-bpe",
    "llama-v3": "llama-bpe",
    "llama3": "llama-bpe",
    "qwen2": "qwen2",
}
"""tokenizer.ggml.pre -> how words split."""

_CONTROL, _USER_DEFINED = 3, 4


def gguf_tokenizer(metadata: dict[str, Any], source: str) -> Tokenizer:
    """LockstepError for a kind of tokenizer that is not byte-level BPE, or splits in an unknown way."""
    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2":
        raise LockstepError(
            f"{source}: tokenizer.ggml.model = {kind!r} is not supported, only 'gpt2' (byte-level BPE); "
            "load the model's Hugging Face directory instead, whose tokenizer.json can be any"
        )
    if split not in _SPLITS:
        raise LockstepError(
            f"{source}: tokenizer.ggml.pre = {split!r} is not supported; known are {', '.join(_SPLITS)}"
        )
    backend = _backend(metadata, _SPLITS[split])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", _SPLITS[split] == "llama-bpe"):
        text = metadata["tokenizer.ggml.tokens"][bos]
        start = processors.TemplateProcessing(
            single=f"{text} $A", pair=f"{text} $A {text} $B", special_tokens=[(text, bos)]
        )
        backend.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), start])
    template = metadata.get("tokenizer.chat_template")
    pad = metadata.get("tokenizer.ggml.padding_token_id")
    eos = metadata.get("tokenizer.ggml.eos_token_id")
    settings = {} if eos is None else {"eos_token": metadata["tokenizer.ggml.tokens"][eos]}
    return Tokenizer(backend, template, bos, frozenset(eos_ids(metadata)), pad, settings)


def _backend(metadata: dict[str, Any], split: str) -> Backend:
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama-bpe"))
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = byte_level(split)
    backend.decoder = decoders.ByteLevel()
    types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in marked if k == _CONTROL])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in marked if k == _USER_DEFINED])
    return backend
