"""What a decoder is: sizes, and the few choices in which the families differ."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from lockstep.config.section import Section

Positive = Annotated[int, Field(gt=0)]


class RopeScaling(Section):
    """How the rotary frequencies are stretched beyond the positions of the first training."""

    kind: Literal["linear", "llama3", "yarn"]
    """linear: every frequency divided by factor. llama3 and yarn: only the long wavelengths, with a smooth passage."""
    factor: float = Field(gt=0)
    """By how much the frequencies are divided."""
    low_freq_factor: float = 1.0
    """llama3: wavelengths longer than original_max_positions / low_freq_factor are divided by factor."""
    high_freq_factor: float = 4.0
    """llama3: wavelengths shorter than original_max_positions / high_freq_factor are left alone."""
    original_max_positions: Positive = 8192
    """llama3 and yarn: positions of the first training."""
    beta_fast: float = Field(default=32.0, gt=0)
    """yarn: frequencies that turn more often than this within the first training are left alone."""
    beta_slow: float = Field(default=1.0, gt=0)
    """yarn: frequencies that turn less often than this within the first training are divided by factor."""
    mscale: float = Field(default=0.0, ge=0)
    """yarn: with mscale_all_dim, how strongly cosine and sine grow with factor. 0: not given."""
    attention_factor: float | None = Field(default=None, gt=0)
    """yarn: factor on cosine and sine. None: from mscale and mscale_all_dim, or 0.1 ln(factor) + 1 without both."""
    mscale_all_dim: float = Field(default=0.0, ge=0)
    """yarn, latent attention: scores are multiplied by (0.1 mscale_all_dim ln(factor) + 1) squared. 0: not."""

    def growth(self, mscale: float = 1.0) -> float:
        """yarn: 0.1 mscale ln(factor) + 1."""
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0

    @property
    def turn_factor(self) -> float:
        """Factor on cosine and sine."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self.growth(self.mscale) / self.growth(self.mscale_all_dim)
        return self.growth()


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class ModelConfig(Section):
    """A decoder-only transformer: pre-norm blocks of causal attention (GQA or latent) and a gated MLP, or experts."""

    family: str = "llama"
    """Whose block this is, and the model_type on export: llama, mistral, qwen2, qwen3, gemma2, gemma3_text, mixtral,
    qwen3_moe, deepseek_v2 or deepseek_v3."""
    vocab_size: Positive
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    hidden_size: Positive
    """Width of the residual stream."""
    intermediate_size: Positive
    """Width of the gated MLP."""
    num_layers: Positive
    """Transformer blocks."""
    num_heads: Positive
    """Query heads."""
    num_kv_heads: Positive
    """Key and value heads; divides num_heads. Default: num_heads."""
    head_dim: Positive
    """Width of a query or key head; even. Default: hidden_size / num_heads; with kv_lora_rank, the two parts below."""
    max_positions: Positive = 2048
    """Longest sequence."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the mean square in every RMS norm."""
    norm_offset: float = 0.0
    """Added to every norm weight (Gemma: 1, so that a weight of 0 is the identity)."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base wavelength of the rotary position embedding."""
    rope_theta_local: float | None = None
    """Base wavelength in sliding-window layers (Gemma 3), unscaled. None: as in the others."""
    rope_scaling: RopeScaling | None = None
    """Stretching of the rotary frequencies."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the MLP's gate."""
    tie_embeddings: bool = False
    """The output head is the embedding."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections (Qwen2)."""
    qk_norm: bool = False
    """RMS norm over each query and key head before the rotation (Qwen3, Gemma 3)."""
    post_norms: bool = False
    """A norm after attention and MLP too, before the residual sum (Gemma 3)."""
    embedding_scale: float = 1.0
    """Factor on the embeddings (Gemma: sqrt(hidden_size)); rounded to the compute dtype first."""
    sliding_window: Positive | None = None
    """A sliding layer's query sees the last this many positions, itself included. None: no layer slides."""
    layer_windows: Annotated[tuple[bool, ...], BeforeValidator(_as_tuple)] | None = None
    """One entry per layer: whether it slides. None: all do when sliding_window is set (Mistral)."""
    attention_softcap: float | None = Field(default=None, gt=0)
    """Scores become attention_softcap * tanh(score / attention_softcap) (Gemma 2). None: they do not."""
    logit_softcap: float | None = Field(default=None, gt=0)
    """Logits become logit_softcap * tanh(logit / logit_softcap) (Gemma 2). None: they do not."""
    attention_scale: float | None = Field(default=None, gt=0)
    """Factor on q . k. None: head_dim ** -0.5."""
    canonical_tp: Positive = 1
    """The number of segments in which sums across tensor-parallel ranks are made, those over the vocabulary among them:
    part of the model's numerics. A power of two that divides num_kv_heads and intermediate_size, and need not divide
    vocab_size; any tensor-parallel degree that divides it gives the same bits."""
    kv_lora_rank: Positive | None = None
    """Width of the latent that keys and values are made from (multi-head latent attention). None: ordinary heads."""
    q_lora_rank: Positive | None = None
    """Latent attention: width of the latent that queries are made from. None: they are made from the block's input."""
    qk_nope_head_dim: Positive | None = None
    """Latent attention: width of the part of a query or key head without positions."""
    qk_rope_head_dim: Positive | None = None
    """Latent attention: width of the rotated part, which all key heads share; even."""
    v_head_dim: Positive | None = None
    """Latent attention: width of a value head."""
    rope_interleaved: bool = False
    """Latent attention: the rotation turns neighbouring elements rather than those half a head apart (DeepSeek)."""
    mla_form: Literal["expanded", "absorbed"] = "expanded"
    """Latent attention, the arithmetic of all paths under numerics bitwise. expanded: keys and values are made from
    the latents, as in training elsewhere, and kept of every head while serving. absorbed: queries go to the latents
    instead, 3.4 times the work in training's attention, and only a latent of each token is kept. Under numerics fast,
    training is always expanded unless this says absorbed, and decode always absorbed."""
    num_experts: Annotated[int, Field(ge=0)] = 0
    """Routed experts of a layer. 0: every layer has one MLP."""
    experts_per_token: Positive = 1
    """Experts that a token goes to."""
    expert_intermediate_size: Positive | None = None
    """Width of an expert. Default: intermediate_size."""
    shared_experts: Annotated[int, Field(ge=0)] = 0
    """Experts that every token goes to; together one MLP, so many times as wide as an expert."""
    dense_layers: Annotated[int, Field(ge=0)] = 0
    """The first so many layers have one MLP of intermediate_size instead of experts."""
    router_scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Scores of the experts: softmax over all, or the sigmoid of each, with a bias for the choice (DeepSeek-V3)."""
    router_normalize: bool = True
    """A token's weights of its experts are divided by their sum."""
    router_groups: Positive = 1
    """Equal groups that the experts lie in; by softmax scores a group is as good as its best expert, by sigmoid as its
    best two."""
    router_top_groups: Positive = 1
    """Groups that a token chooses its experts from."""
    router_scale: float = Field(default=1.0, gt=0)
    """Factor on the weights of the experts."""
    router_aux_loss: float = Field(default=0.0, ge=0)
    """Weight of the load-balance loss in training (config.json: router_aux_loss_coef)."""
    bos_id: int | None = None
    """Token that starts a sequence."""
    eos_ids: Annotated[tuple[int, ...], BeforeValidator(_as_tuple)] = ()
    """Tokens that end a generation."""
    pad_id: int | None = None
    """Padding token, only carried into the exported config.json."""

    @model_validator(mode="before")
    @classmethod
    def _derived(cls, data: Any) -> Any:
        """Fill num_kv_heads and head_dim from the sizes they usually follow."""
        if not isinstance(data, dict):
            return data
        data = dict(data)
        heads, hidden = data.get("num_heads"), data.get("hidden_size")
        if data.get("num_kv_heads") is None and heads is not None:
            data["num_kv_heads"] = heads
        parts = data.get("qk_nope_head_dim"), data.get("qk_rope_head_dim")
        if data.get("head_dim") is None and all(isinstance(part, int) for part in parts):
            data["head_dim"] = sum(parts)
        if data.get("expert_intermediate_size") is None and data.get("num_experts"):
            data["expert_intermediate_size"] = data.get("intermediate_size")
        if data.get("head_dim") is None and isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
            if hidden % heads:
                raise ValueError(f"hidden_size {hidden} is no multiple of num_heads {heads}: set head_dim")
            data["head_dim"] = hidden // heads
        return data

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads} must divide num_heads {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} must be even: the rotary embedding turns pairs")
        n = self.canonical_tp
        if n & (n - 1) or self.num_kv_heads % n or self.intermediate_size % n:
            raise ValueError(
                f"canonical_tp {n} must be a power of two that divides num_kv_heads {self.num_kv_heads} and "
                f"intermediate_size {self.intermediate_size}"
            )
        if n > self.vocab_size:
            raise ValueError(f"canonical_tp {n} is more than the vocabulary's {self.vocab_size} tokens: lower it")
        if self.layer_windows is not None and len(self.layer_windows) != self.num_layers:
            raise ValueError(f"layer_windows has {len(self.layer_windows)} entries for num_layers {self.num_layers}")
        if self.layer_windows is not None and any(self.layer_windows) and self.sliding_window is None:
            raise ValueError("layer_windows names sliding layers, but sliding_window is not set")
        self._consistent_experts()
        self._consistent_latents()
        return self

    def _consistent_experts(self) -> None:
        if self.canonical_tp > 1 and (self.num_experts or self.kv_lora_rank is not None):
            raise ValueError(
                f"canonical_tp {self.canonical_tp}: experts and latent attention are not cut across tensor-parallel "
                "ranks in this version; leave it at 1"
            )
        if not self.num_experts:
            return
        if self.dense_layers > self.num_layers:
            raise ValueError(
                f"dense_layers {self.dense_layers} is more than the num_layers {self.num_layers} there are"
            )
        if self.num_experts % self.router_groups:
            raise ValueError(f"router_groups {self.router_groups} must divide num_experts {self.num_experts}")
        if self.router_top_groups > self.router_groups:
            raise ValueError(f"router_top_groups {self.router_top_groups} is more than router_groups")
        size = self.num_experts // self.router_groups
        if self.router_scoring == "sigmoid" and self.router_groups > 1 and size < 2:
            raise ValueError(f"router_groups {self.router_groups} leaves groups of {size}: a group needs two experts")
        if self.experts_per_token > size * self.router_top_groups:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than the {size * self.router_top_groups} experts "
                "there are to choose from"
            )

    def _consistent_latents(self) -> None:
        if self.kv_lora_rank is None:
            return
        nope, rope = self.qk_nope_head_dim, self.qk_rope_head_dim
        if nope is None or rope is None or self.v_head_dim is None:
            raise ValueError("kv_lora_rank needs qk_nope_head_dim, qk_rope_head_dim and v_head_dim")
        if self.head_dim != nope + rope or rope % 2:
            raise ValueError(
                f"head_dim {self.head_dim} must be qk_nope_head_dim {nope} + qk_rope_head_dim {rope}, even"
            )
        if self.num_kv_heads != self.num_heads:
            raise ValueError(f"num_kv_heads {self.num_kv_heads}: latent attention has as many as num_heads")
        if self.sliding_window is not None:
            raise ValueError("sliding_window: latent attention has none")

    def slides(self, layer: int) -> bool:
        """Whether this layer attends over the sliding window only."""
        if self.sliding_window is None:
            return False
        return self.layer_windows is None or self.layer_windows[layer]

    @property
    def scale(self) -> float:
        """Factor on q . k."""
        if self.attention_scale is not None:
            return self.attention_scale
        scaling = self.rope_scaling
        if self.kv_lora_rank is None or scaling is None or scaling.kind != "yarn" or not scaling.mscale_all_dim:
            return float(self.head_dim**-0.5)
        return float(self.head_dim**-0.5 * scaling.growth(scaling.mscale_all_dim) ** 2)

    @property
    def rope_dim(self) -> int:
        """Width of what is rotated in a head."""
        return self.head_dim if self.qk_rope_head_dim is None else self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int | None:
        """Elements that latent attention keeps of a token, the latent and the rotated key; None without it."""
        return None if self.kv_lora_rank is None else self.kv_lora_rank + self.rope_dim

    def has_experts(self, layer: int) -> bool:
        """Whether this layer has experts in place of one MLP."""
        return self.num_experts > 0 and layer >= self.dense_layers
