"""Low-rank adapters and export, through the model room."""

from __future__ import annotations

import hashlib
from pathlib import Path

from lockstep.config import Config
from lockstep.model.decoder import Decoder
from lockstep.model.model import Model


def weights_hash(decoder: Decoder) -> str:
    """One hash over all weights, names and dtypes included."""
    digest = hashlib.sha256()
    for name, parameter in sorted(decoder.named_parameters()):
        digest.update(f"{name}{list(parameter.shape)}{parameter.dtype}".encode())
        digest.update(parameter.detach().contiguous().view(-1).view(__import__("torch").uint8).numpy().data)
    return digest.hexdigest()


def add_adapters(decoder: Decoder, config: Config) -> None:
    raise NotImplementedError


def export_model(model: Model, config: Config, path: Path) -> None:
    model.save(path, force=True)
