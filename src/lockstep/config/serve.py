"""The `serve` section: the engine's limits and the server's door."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lockstep.config.section import Section

BATCH_TOKENS = 128
"""Tokens of one forward pass where nothing else is said."""
_UNITS = {
    "": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip


def byte_count(text: str) -> int:
    """`"1GiB"` -> 1073741824. ValueError when it is no size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        raise ValueError(f"{text!r} is not a size: write a number with a unit, such as 512MiB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _is_size(text: str) -> str:
    byte_count(text)
    return text


class ServeConfig(Section):
    """How a model is served."""

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 lets other machines in (set an api_key then)."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """TCP port; 0 takes a free one."""
    model_name: str | None = None
    """The name clients ask for; default: the path or alias of the model."""
    api_key: str | None = None
    """Clients must send it as `Authorization: Bearer KEY`; none is asked for by default."""
    api_keys: dict[str, Annotated[str, Field(min_length=1)]] = Field(default_factory=dict)
    """Keys of several clients by the clients' names, beside api_key. Whose key a request has decides whose share of the
    engine it takes, whatever its `user` says."""
    shares: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """How much more than others a client gets while requests wait, by its name in api_keys or by `user`: 2 is twice
    the tokens. 1 for whom it does not name."""
    cors_origins: list[str] = Field(default_factory=list)
    """Web pages of other servers that browsers let ask this one, by origin, such as https://app.example; `*` is any.
    None by default."""
    kv_memory: Annotated[str, AfterValidator(_is_size)] = "1GiB"
    """Memory for keys and values, such as 512MiB or 4GiB. It is taken as it is used."""
    kv_dtype: Literal["auto", "int8"] = "auto"
    """auto: the compute dtype. int8: half of bfloat16's memory, a scale for each head of each token; it needs
    numerics fast."""
    max_batch_tokens: Annotated[int, Field(ge=1)] = BATCH_TOKENS
    """Tokens of one forward pass: decoding sequences first, then chunks of prompts."""
    step_seconds: Annotated[float, Field(gt=0)] | None = None
    """How long a forward pass may take while somebody waits for its next token: prompts are then read in chunks of so
    many tokens as fit, by the time that passes took. None: as many as max_batch_tokens allows."""
    level: Literal["O0", "O2"] = "O2"
    """O2 runs a forward pass as one compiled program, taken from the compile cache; O0 operator by operator. The bits
    are the same."""
    max_running: Annotated[int, Field(ge=1)] = 64
    """Sequences that share a forward pass."""
    max_queue: Annotated[int, Field(ge=1)] = 1024
    """Sequences that may wait; more are answered with 429."""
    replicas: Annotated[int, Field(ge=1, le=64)] = 1
    """Engines side by side, each a process with kv_memory and weights of its own; a request goes where its prefix is
    known. The cores are shared out among them."""
    tp: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that share every engine's model, each with its part of the weights, keys and values (tensor parallel).
    The bits do not depend on it; where the model's canonical_tp is a multiple it is faster."""
    prefix_cache: bool = True
    """Keep the keys and values of finished requests and share them by prefix."""
    drafts: Annotated[int, Field(ge=0, le=32)] | None = None
    """Tokens guessed and verified in one pass, same output: by the draft model, or by prompt lookup (faster on text
    that repeats itself). None: 4 with a draft model, else 0."""
    draft_model: str | None = None
    """A small model of the same vocabulary that guesses: a directory, a GGUF file or an alias. Its keys and values
    are part of kv_memory."""
    weight_cache: Annotated[str, AfterValidator(_is_size)] = "16GiB"
    """Disk for weights as the products read them, so that a second start packs nothing (`lockstep cache ls`); the
    least recently used models go first. 0: keep none."""
    default_max_tokens: Annotated[int, Field(ge=1)] = 1024
    """Tokens a chat request without max_tokens may generate (text completions: 16, as OpenAI's)."""
    request_timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds after which a request is ended with what it has; none by default."""
    structure_seconds: Annotated[float, Field(gt=0)] = 3.0
    """How long the schema, grammar or expression of structured output may take to compile; what takes longer is
    answered with 400."""
    max_body: Annotated[str, AfterValidator(_is_size)] = "8MiB"
    """The largest request body; a larger one is answered with 413."""
    drain_seconds: Annotated[int, Field(ge=0)] = 30
    """At SIGTERM: how long running requests may go on."""
    hang_seconds: Annotated[float, Field(gt=0)] = 30.0
    """How long an engine may neither answer nor compute before it is ended and started again."""
    otel: bool = False
    """A span for each request, sent by OpenTelemetry to where the variable OTEL_EXPORTER_OTLP_ENDPOINT says; needs
    `pip install 'lockstep[otel]'`."""
    weight_updates: bool = False
    """Let clients replace the weights with those of a path on this machine (POST /v1/weights)."""
