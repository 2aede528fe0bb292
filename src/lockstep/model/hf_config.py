"""config.json of a Hugging Face directory, to ModelConfig and back."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from lockstep.config.model import ModelConfig
from lockstep.errors import LockstepError
from lockstep.model.families import Family, check, family

_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "bos_id": "bos_token_id",
    "pad_id": "pad_token_id",
}
"""Our fields that are one key of config.json, under another name."""

_MUST_BE_OFF = ("attention_bias", "mlp_bias", "attn_logit_softcapping", "final_logit_softcapping",
                "use_bidirectional_attention", "quantization_config")  # fmt: skip
"""Keys whose effect the decoder does not have, or has in no family without a field for them."""

_MUST_BE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"decoder_sparse_step": 1},
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax", "mlp_bias": False},
    "deepseek_v3": {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
}
"""Keys of a family that may be left out, and otherwise have the one value that the decoder knows."""

_YARN = ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor")

_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def read_config(raw: dict[str, Any], source: str) -> ModelConfig:
    """ModelConfig of a parsed config.json, in the spelling of transformers 4 or 5. LockstepError names the key."""
    name = raw.get("model_type")
    if not isinstance(name, str):
        raise LockstepError(f"{source}: no model_type, so this is not the config.json of a model")
    table = family(name, f"{source}: model_type")
    raw = {table.hf_aliases.get(key, key): value for key, value in raw.items()}
    raw = {key: value for key, value in {**table.hf_defaults, **raw}.items() if value is not None}
    for key in _MUST_BE_OFF:
        if raw.get(key) and key not in table.hf_keys.values():
            raise LockstepError(f"{source}: {key} = {raw[key]!r} is not supported; only models without it load")
    for key, value in _MUST_BE.get(name, {}).items():
        if raw.get(key, value) != value:
            raise LockstepError(f"{source}: {key} = {raw[key]!r} is not supported; only {value!r} is")
    keys = {**_KEYS, **table.hf_keys}
    fields: dict[str, Any] = {ours: raw[theirs] for ours, theirs in keys.items() if theirs in raw}
    fields |= dict(table.implied) | {"family": name, "activation": _activation(raw, table, source)}
    fields["canonical_tp"] = raw.get("canonical_tp", 1)
    eos = raw.get("eos_token_id", ())
    fields["eos_ids"] = tuple(eos) if isinstance(eos, list | tuple) else (eos,)
    try:
        fields |= _rope(raw, source)
        fields |= _windows(name, raw)
        if name.startswith("gemma"):
            fields["embedding_scale"] = raw["hidden_size"] ** 0.5
            fields["attention_scale"] = raw["query_pre_attn_scalar"] ** -0.5
        _special(name, raw, fields, source)
    except (KeyError, TypeError, AttributeError) as error:
        raise LockstepError(f"{source}: a value is missing or of the wrong type ({error!r})") from error
    return validated(fields, source)


def _special(name: str, raw: dict[str, Any], fields: dict[str, Any], source: str) -> None:
    """What the families with experts and latents say in ways of their own."""
    if name == "qwen3_moe":
        dense = raw.get("mlp_only_layers", [])
        if sorted(dense) != list(range(len(dense))):
            raise LockstepError(f"{source}: mlp_only_layers = {dense!r} is not supported; only the first layers are")
        fields["dense_layers"] = len(dense)
    if name == "deepseek_v2":
        method = raw["topk_method"]
        if method not in ("greedy", "group_limited_greedy"):
            raise LockstepError(
                f"{source}: topk_method = {method!r} is not supported; greedy and group_limited_greedy are"
            )
        if method == "greedy":
            fields |= {"router_groups": 1, "router_top_groups": 1}
    if "kv_lora_rank" in fields:
        fields.pop("head_dim", None)  # there it is the width of the rotated part
        fields["mla_form"] = raw.get("mla_form", "expanded")


def validated(fields: dict[str, Any], source: str) -> ModelConfig:
    """ModelConfig of these fields; a wrong or missing one is a LockstepError that names it and the file."""
    try:
        config = ModelConfig.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"] if not isinstance(part, int))
        reason = first["msg"].removeprefix("Value error, ")
        if key:
            found = "" if first["type"] == "missing" else f" (found {first['input']!r})"
            keys = {**_KEYS, **family(fields["family"]).hf_keys}
            theirs = "eos_token_id" if key == "eos_ids" else keys.get(key, key)
            reason = f"{theirs}: {reason}{found}"
        raise LockstepError(f"{source}: {reason}") from error
    check(config)
    return config


def _activation(raw: dict[str, Any], table: Family, source: str) -> str:
    key = table.hf_activation_key
    name = raw.get(key, "silu")
    if name not in _ACTIVATIONS:
        raise LockstepError(f"{source}: {key} = {name!r} is not supported; known are {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _rope(raw: dict[str, Any], source: str) -> dict[str, Any]:
    """transformers 5 has rope_parameters (per layer type in Gemma 3), 4 rope_theta with rope_scaling. Where both
    stand, rope_scaling counts, as it does there: people add it by hand."""
    parameters = raw.get("rope_parameters") or {}
    full = parameters.get("full_attention", parameters)
    local = parameters.get("sliding_attention", {})
    scaling = raw.get("rope_scaling") or full
    fields: dict[str, Any] = {
        "rope_theta": scaling.get("rope_theta", full.get("rope_theta", raw.get("rope_theta", 10000.0)))
    }
    fields["rope_scaling"] = _scaling(scaling, raw, source)
    if "rope_local_base_freq" in raw:
        fields["rope_theta_local"] = local.get("rope_theta", raw["rope_local_base_freq"])
        if _scaling(local, raw, source) is not None:
            raise LockstepError(f"{source}: rope scaling in sliding-window layers is not supported")
    return fields


def _scaling(found: dict[str, Any], raw: dict[str, Any], source: str) -> dict[str, Any] | None:
    """The fields of a RopeScaling, for `validated`."""
    kind = found.get("rope_type", found.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return {"kind": "linear", "factor": found["factor"]}
    if kind == "llama3":
        return {
            "kind": "llama3",
            "factor": found["factor"],
            "low_freq_factor": found["low_freq_factor"],
            "high_freq_factor": found["high_freq_factor"],
            "original_max_positions": found.get("original_max_position_embeddings", raw["max_position_embeddings"]),
        }
    if kind == "yarn":
        if not found.get("truncate", True):
            raise LockstepError(
                f"{source}: rope scaling with truncate = false is not supported; only models without load"
            )
        optional = {ours: found[ours] for ours in _YARN if found.get(ours)}
        original = found.get("original_max_position_embeddings", raw["max_position_embeddings"])
        return {"kind": "yarn", "factor": found["factor"], "original_max_positions": original, **optional}
    raise LockstepError(f"{source}: rope type {kind!r} is not supported; known are default, linear, llama3, yarn")


def _windows(name: str, raw: dict[str, Any]) -> dict[str, Any]:
    """Which layers slide: all (Mistral), those of layer_types, or by the family's older keys."""
    window, layers = raw.get("sliding_window"), raw.get("num_hidden_layers", 0)
    if window is None or (name.startswith("qwen") and not raw.get("use_sliding_window", False)):
        return {}
    if name == "llama" or name.startswith("deepseek"):
        return {}
    if name in ("mistral", "mixtral", "qwen3_moe"):
        return {"sliding_window": window}
    if "layer_types" in raw:
        slide = tuple(kind == "sliding_attention" for kind in raw["layer_types"])
    elif name == "gemma2":
        slide = tuple(i % 2 == 0 for i in range(layers))
    elif name == "gemma3_text":
        pattern = raw.get("_sliding_window_pattern", raw["sliding_window_pattern"])
        slide = tuple((i + 1) % pattern != 0 for i in range(layers))
    else:
        slide = tuple(i >= raw["max_window_layers"] for i in range(layers))
    return {"sliding_window": window, "layer_windows": slide}


def write_config(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """config.json's content; transformers 4 and 5 both read it."""
    check(config)
    table = family(config.family)
    raw: dict[str, Any] = {"architectures": [table.architecture], "model_type": config.family}
    raw |= {theirs: getattr(config, ours) for ours, theirs in {**_KEYS, **table.hf_keys}.items()}
    names = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
    raw[table.hf_activation_key] = names[config.activation]
    raw["eos_token_id"] = list(config.eos_ids) if len(config.eos_ids) != 1 else config.eos_ids[0]
    if not config.eos_ids:
        raw["eos_token_id"] = None
    raw |= _write_rope(config) | _write_windows(config)
    if config.family.startswith("gemma"):
        scalar = config.scale**-2
        raw["query_pre_attn_scalar"] = round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar
    raw |= _write_special(config)
    if config.canonical_tp > 1:  # not a key of transformers, which keeps what it does not know
        raw["canonical_tp"] = config.canonical_tp
    raw |= {"torch_dtype": dtype, "dtype": dtype, "use_cache": True}
    return raw


def _write_special(config: ModelConfig) -> dict[str, Any]:
    raw: dict[str, Any] = {}
    if config.family == "qwen3_moe":
        raw |= {"decoder_sparse_step": 1, "mlp_only_layers": list(range(config.dense_layers))}
    if config.family == "deepseek_v2":
        raw |= {"topk_method": "greedy" if config.router_groups == 1 else "group_limited_greedy"}
    if config.family.startswith("deepseek"):
        raw |= {"head_dim": config.rope_dim, "num_nextn_predict_layers": 0, "mla_form": config.mla_form}
        raw |= {"norm_topk_prob": config.router_normalize}
    return raw


def _write_rope(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling
    full: dict[str, Any] = {"rope_type": "default"} if scaling is None else {
        "rope_type": scaling.kind, "factor": scaling.factor,
    }  # fmt: skip
    if scaling is not None and scaling.kind == "llama3":
        full |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    if scaling is not None and scaling.kind == "yarn":
        full["original_max_position_embeddings"] = scaling.original_max_positions
        usual = type(scaling).model_fields
        full |= {key: getattr(scaling, key) for key in _YARN if getattr(scaling, key) != usual[key].default}
    raw = {"rope_theta": config.rope_theta, "rope_scaling": None if scaling is None else dict(full)}
    full["rope_theta"] = config.rope_theta
    if config.rope_theta_local is None:
        return {**raw, "rope_parameters": full}
    local = {"rope_type": "default", "rope_theta": config.rope_theta_local}
    raw["rope_local_base_freq"] = config.rope_theta_local
    return {**raw, "rope_parameters": {"full_attention": full, "sliding_attention": local}}


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    slide = [config.slides(i) for i in range(config.num_layers)]
    raw: dict[str, Any] = {}
    if config.family != "llama" and not config.family.startswith("deepseek"):
        raw["sliding_window"] = config.sliding_window
    if config.family == "qwen3_moe":
        return raw | {"use_sliding_window": any(slide)}
    if config.family.startswith("qwen"):
        raw |= {"use_sliding_window": any(slide), "max_window_layers": slide.index(True) if any(slide) else 0}
    if config.family.startswith(("qwen", "gemma")):
        raw["layer_types"] = ["sliding_attention" if s else "full_attention" for s in slide]
    return raw
