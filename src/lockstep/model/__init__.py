"""One decoder for every family, its weights in and out, its tokenizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.lazy import importer

if TYPE_CHECKING:
    from lockstep.model.decoder import Decoder as Decoder
    from lockstep.model.families import FAMILIES as FAMILIES
    from lockstep.model.init import random_decoder as random_decoder
    from lockstep.model.loading import load as load
    from lockstep.model.model import Model as Model
    from lockstep.model.tokenizer import Tokenizer as Tokenizer
    from lockstep.model.tokenizer import train_bpe as train_bpe
    from lockstep.model.weights.packed import PackedCache as PackedCache

_FILES = {
    "FAMILIES": "families", "Decoder": "decoder", "Model": "model", "PackedCache": "weights.packed",
    "Tokenizer": "tokenizer", "load": "loading", "random_decoder": "init", "train_bpe": "tokenizer",
}  # fmt: skip
"""Where each public name lives. It is imported when asked for: a tokenizer has no use for torch."""

__all__ = ["FAMILIES", "Decoder", "Model", "PackedCache", "Tokenizer", "load", "random_decoder", "train_bpe"]

__getattr__ = importer(__name__, _FILES)
