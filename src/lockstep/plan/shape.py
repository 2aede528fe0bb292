"""What the planner must know of a model: its sizes, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin, get_type_hints

from lockstep.errors import LockstepError
from lockstep.given import instance

LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_MEGATRON_VOCABULARY = 51200
_LARGEST = 1 << 24
"""Of a model's sizes: products of two, and a model's parameters, stay far from where numbers lose exactness."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder-only transformer.

    ``gated``: three matrices in the MLP instead of two. ``experts`` > 0: every layer after the first ``dense_layers``
    has that many experts of width ``expert_intermediate``, ``experts_per_token`` of them used, plus
    ``shared_intermediate`` used always. ``attention``: ``flash`` never writes the score matrix, ``unfused`` writes it
    and reads it back. ``logits``: ``chunked`` makes the loss and its gradient a chunk of rows at a time, as this system
    does, ``kept`` holds all of them. ``states``: ``masters`` are float32 weights, rounded at use, and a fixed tree of
    gradient sums over micro-batches, as in this system; ``mixed`` 16-bit weights, one float32 gradient, and float32
    masters in the optimizer. ``residual_bytes``: of an element between blocks, 4 as this
    system keeps it or 2. ``positions``: rows of a learned position embedding (0: none, as with rotary
    positions). ``dropout``: keeps masks, as GPT-2 and GPT-3 do. ``kv_lora_rank`` > 0: multi-head latent attention
    (DeepSeek-V2, arXiv 2405.04434): keys and values are made from a latent of that width beside a rotated part of
    ``qk_rope_head_dim`` that the heads share, queries from one of ``q_lora_rank`` (0: from the block's input).
    """

    name: str
    layers: int
    hidden: int
    heads: int
    vocab: int
    intermediate: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    gated: bool = False
    tied: bool = True
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    dense_layers: int = 0
    attention: Literal["flash", "unfused"] = "flash"
    logits: Literal["chunked", "kept"] = "chunked"
    residual_bytes: Literal[2, 4] = 4
    states: Literal["masters", "mixed"] = "masters"
    positions: int = 0
    dropout: bool = False
    kv_lora_rank: int = 0
    q_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        instance(self.name, str, "a model's name")
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("layers", "hidden", "heads", "vocab") else 0
            fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST
            if field.type == "int" and not fits:
                span = "of at least 1" if least else "of at least 1, or 0"
                raise LockstepError(
                    f"model {self.name}: {field.name} is {value!r:.60}; it must be a whole number {span}"
                    + (f" and at most {_LARGEST:,}." if isinstance(value, int) and value > _LARGEST else ".")
                )
            if field.type == "bool":
                instance(value, bool, f"model {self.name}: {field.name}")
        for name, values in _CHOICES.items():
            if getattr(self, name) not in values:
                said = ", ".join(map(str, values))
                raise LockstepError(f"model {self.name}: {name} is {getattr(self, name)!r}; expected one of {said}.")
        if self.experts:
            self._check_experts()
        if self.kv_lora_rank:
            self._check_latent()
        if not self.head_dim and self.hidden % self.heads:
            raise LockstepError(
                f"model {self.name}: heads {self.heads} does not divide hidden {self.hidden}: change one, or give "
                "head_dim."
            )
        if self.dense_layers > self.layers:
            raise LockstepError(
                f"model {self.name}: dense_layers is {self.dense_layers}; give at most {self.layers}, the layers."
            )
        defaults = {"intermediate": 4 * self.hidden, "kv_heads": self.heads, "head_dim": self.hidden // self.heads}
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)
        if self.heads % self.kv_heads:
            raise LockstepError(f"model {self.name}: kv_heads {self.kv_heads} does not divide heads {self.heads}.")

    def _check_experts(self) -> None:
        if not 1 <= self.experts_per_token <= self.experts:
            raise LockstepError(
                f"model {self.name}: experts_per_token is {self.experts_per_token}; with {self.experts} experts it "
                f"must be 1 to {self.experts}."
            )
        if self.expert_intermediate < 1:
            raise LockstepError(f"model {self.name}: experts need expert_intermediate, their width, of at least 1.")

    def _check_latent(self) -> None:
        missing = [n for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim") if getattr(self, n) < 1]
        if missing:
            raise LockstepError(f"model {self.name}: kv_lora_rank {self.kv_lora_rank} needs {', '.join(missing)} too.")
        object.__setattr__(self, "head_dim", self.qk_nope_head_dim + self.qk_rope_head_dim)
        object.__setattr__(self, "kv_heads", self.heads)

    @property
    def value_dim(self) -> int:
        """Width of a value head."""
        return self.v_head_dim or self.head_dim

    @property
    def latent(self) -> int:
        """Width that the block's input is projected down to: the latents and the shared rotated part."""
        return self.q_lora_rank + self.kv_lora_rank + self.qk_rope_head_dim if self.kv_lora_rank else 0

    @property
    def latent_parameters(self) -> int:
        """Of one layer: projections down to the latents, which every tensor rank has whole."""
        return self.hidden * self.latent

    @property
    def head_parameters(self) -> int:
        """Of one layer: query, key, value and output projections, which tensor ranks cut by heads."""
        output = self.hidden * self.heads * self.value_dim
        if self.kv_lora_rank:
            queries = (self.q_lora_rank or self.hidden) * self.heads * self.head_dim
            return queries + self.kv_lora_rank * self.heads * (self.qk_nope_head_dim + self.value_dim) + output
        return self.hidden * self.head_dim * (self.heads + 2 * self.kv_heads) + output

    @property
    def attention_parameters(self) -> int:
        """Of one layer."""
        return self.latent_parameters + self.head_parameters

    @property
    def dense_parameters(self) -> int:
        """Of one dense layer's MLP."""
        return (3 if self.gated else 2) * self.hidden * self.intermediate

    @property
    def expert_parameters(self) -> int:
        """Of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.expert_intermediate

    @property
    def parameters(self) -> int:
        """All weights (norms and biases, below 0.1 %, are left out)."""
        moe = self.layers - self.dense_layers if self.experts else 0
        shared = (3 if self.gated else 2) * self.hidden * self.shared_intermediate + self.hidden * self.experts
        body = self.layers * self.attention_parameters + (self.layers - moe) * self.dense_parameters
        body += moe * (self.experts * self.expert_parameters + shared)
        return body + self.hidden * (self.vocab * (1 if self.tied else 2) + self.positions)

    @property
    def active_parameters(self) -> int:
        """Weights that multiply one token, the head included, the embedding not."""
        moe = self.layers - self.dense_layers if self.experts else 0
        shared = (3 if self.gated else 2) * self.hidden * self.shared_intermediate + self.hidden * self.experts
        body = self.layers * self.attention_parameters + (self.layers - moe) * self.dense_parameters
        return body + moe * (self.experts_per_token * self.expert_parameters + shared) + self.hidden * self.vocab

    def flops_per_token(self, seq: int) -> float:
        """Forward and backward of a causal model, as MFU counts it (PaLM): 6 per active weight, attention over seq."""
        return 6.0 * self.active_parameters + 3.0 * self.layers * self.heads * (self.head_dim + self.value_dim) * seq


_CHOICES = {name: get_args(hint) for name, hint in get_type_hints(ModelShape).items() if get_origin(hint) is Literal}
"""Fields that are one of a few values."""


def megatron_gpt(layers: int, hidden: int, heads: int, positions: int) -> ModelShape:
    """A GPT model as Megatron built it in 2021: dropout, learned positions, attention that is not fused."""
    return ModelShape(
        "gpt",
        layers,
        hidden,
        heads,
        _MEGATRON_VOCABULARY,
        attention="unfused",
        logits="kept",
        residual_bytes=2,
        states="mixed",
        positions=positions,
        dropout=True,
    )
