"""What cannot be served, told before anything is started: by the headers of the model's files. Imports no PyTorch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from lockstep.config.model import ModelConfig
from lockstep.config.pages import page_dtype, page_size
from lockstep.errors import LockstepError
from lockstep.model.source import Told, told, uncut_adapter
from lockstep.serve.capacity import page_count
from lockstep.serve.tp.divide import fitted
from lockstep.serve.wire import EngineSpec

if TYPE_CHECKING:
    from lockstep.ops import Numerics


def check_spec(spec: EngineSpec, replicas: int = 1) -> None:
    """Raise LockstepError where engines of this description could not start."""
    model = check_model(spec.model, spec.tp, spec.numerics)
    if not model.has_tokenizer:
        raise LockstepError(
            f"{spec.model} comes without a tokenizer, which a server needs: put its tokenizer.json beside the weights."
        )
    page = page_size(model.config, spec.numerics, page_dtype(model.config, spec.numerics, spec.dtype, spec.kv_dtype))
    if spec.draft_model is not None:
        draft = told(spec.draft_model).config
        check_vocabulary(draft, model.config)
        page += page_size(draft, spec.numerics, spec.dtype)
    page_count(spec.kv_memory, page, replicas)


def check_model(path: str, tp: int, numerics: Numerics) -> Told:
    """What is told of a model; LockstepError where there is none, or so many processes cannot share it."""
    model = told(path)
    if tp > 1:
        if model.is_adapter:
            raise uncut_adapter(path)
        fitted(model.config, tp, numerics)
    return model


def check_tracing() -> None:
    """LockstepError where what makes spans, or what sends them, is not installed."""
    try:
        found = all(map(find_spec, ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http")))
    except ModuleNotFoundError:  # of a package that they are part of
        found = False
    if not found:
        raise LockstepError(
            "serve.otel is true, but OpenTelemetry is not installed: run pip install 'lockstep[otel]', "
            "or leave serve.otel out."
        )


def check_vocabulary(draft: ModelConfig, config: ModelConfig) -> None:
    """LockstepError where the two do not speak of the same number of tokens."""
    if draft.vocab_size != config.vocab_size:
        raise LockstepError(
            f"the draft model has a vocabulary of {draft.vocab_size} tokens, the model one of {config.vocab_size}: "
            "give a draft model of the same family."
        )
