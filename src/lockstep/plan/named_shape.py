"""The shape of a model that is named: by a packaged name, a Hugging Face config.json, a run's YAML, or its sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.config import Config
from lockstep.config.check import check
from lockstep.errors import LockstepError
from lockstep.given import instance, whole
from lockstep.model.families import FAMILIES
from lockstep.plan.decoder_config import planner_shape
from lockstep.plan.shape import LATENT, ModelShape
from lockstep.plan.yaml_file import read_json, read_yaml

_LIBRARY = Path(__file__).with_name("models.yaml")


def model_shape(given: str | Path | Mapping[str, Any] | ModelShape) -> ModelShape:
    """A shape from a packaged name (``llama3-70b``), a config.json or its directory, a mapping or a shape itself.

    Raises LockstepError for an unknown name (with the nearest) and for sizes that are missing or unknown.
    """
    if isinstance(given, ModelShape):
        return given
    if isinstance(given, Mapping):
        return _explicit(given)
    if not isinstance(given, (str, Path)):
        raise LockstepError(f"model is {given!r:.60}; give a name, a config.json, sizes by name, or a ModelShape.")
    if not str(given).strip():
        raise LockstepError("model is empty: give a name such as llama3-8b, a config.json, or a YAML file with sizes.")
    path = Path(given)
    file = path / "config.json" if os.path.isdir(path) else path
    if file.suffix == ".json":
        return _hugging_face(file)
    if is_yaml(file):
        content = read_model(file)
        return shape_of_run(run) if (run := run_of(content, file)) else _explicit(content)
    table = _table()
    if (name := str(given).lower()) in table:
        return _explicit({"name": name, **table[name]})
    near = get_close_matches(name, list(table), n=1, cutoff=0.0)[0]
    raise LockstepError(
        f"unknown model {str(given)!r:.60}: the nearest name is {near!r}. Known are {', '.join(table)}; "
        "a config.json, its directory, or a YAML file with the sizes works too."
    )


@cache
def _table() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = read_yaml(_LIBRARY, "model file")
    return content


def is_yaml(file: Path) -> bool:
    """By its name."""
    return file.suffix in (".yaml", ".yml")


def read_model(file: Path) -> dict[str, Any]:
    """A YAML file that describes a model, or a run."""
    content = read_yaml(file, "model file")
    if not isinstance(content, dict):
        raise LockstepError(f"model file {file} must be a mapping with layers, hidden, heads and vocab.")
    return content


def run_of(content: dict[str, Any], file: Path) -> Config | None:
    """A training run's configuration, where the file is one. Raises LockstepError for a mistake in it."""
    return check(Config, content, str(file)) if set(content) & set(Config.model_fields) else None


def shape_of_run(run: Config) -> ModelShape:
    """A new model's sizes, or those of what it loads."""
    return model_shape(run.model) if isinstance(run.model, str) else planner_shape(run.model)


def _explicit(given: Mapping[str, Any]) -> ModelShape:
    known = [field.name for field in fields(ModelShape)]
    for key in given:
        if key not in known:
            near = get_close_matches(str(key), known, n=1, cutoff=0.0)[0]
            raise LockstepError(f"model shape: unknown key {key!r}: the nearest is {near!r}.")
    missing = [key for key in ("layers", "hidden", "heads", "vocab") if key not in given]
    if missing:
        raise LockstepError(f"model shape: {', '.join(missing)} missing: give layers, hidden, heads and vocab.")
    return ModelShape(**{"name": "custom", **given})


_PLAIN = ("gpt2", "opt")
"""Types of models with an MLP without a gate, whatever their activation."""
_GATES = ("silu", "swish", "swiglu")
"""Activations that stand in a gate in all models that have them."""


def _gated(kind: str, activation: str, file: Path) -> bool:
    """Whether a model's MLP has a gate. No type: as Llama's. Raises LockstepError where nothing tells."""
    if kind in ("", "gemma", *FAMILIES):
        return True
    if kind in _PLAIN or activation:
        return kind not in _PLAIN and activation in _GATES
    raise LockstepError(
        f"{file}: whether the MLP of a model of type {kind!r} has a gate is not known: the file has no hidden_act, and "
        f"known types are {', '.join((*FAMILIES, *_PLAIN))}. Write its sizes into a YAML file with layers, hidden, "
        "heads, vocab and gated."
    )


def _language_model(file: Path) -> dict[str, Any]:
    """What a config.json says of the language model."""
    config = read_json(file, "model file")
    config = config.get("text_config") or config if isinstance(config, dict) else config
    if not isinstance(config, dict):
        raise LockstepError(f"{file} must be a JSON object with the model's sizes, as in a Hugging Face config.json.")
    return config


def _hugging_face(file: Path) -> ModelShape:
    if not os.path.exists(file):
        raise LockstepError(f"{file} does not exist: give a config.json, its directory or a model's name.")
    config = _language_model(file)

    def take(*names: str, default: Any = None) -> Any:
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if found is None:
            raise LockstepError(f"{file} has no {names[0]}: it is needed to plan.")
        return found

    kind = instance(config.get("model_type", ""), str, f"{file}: model_type")
    if kind in FAMILIES:  # what its authors leave out of the file
        aliases = {FAMILIES[kind].hf_aliases.get(key, key): value for key, value in config.items()}
        config = {**FAMILIES[kind].hf_defaults, **{key: value for key, value in aliases.items() if value is not None}}
    experts = take("num_local_experts", "num_experts", "n_routed_experts", default=0)
    gated = _gated(kind, take("hidden_act", "hidden_activation", "activation_function", default=""), file)
    hidden = take("hidden_size", "n_embd")
    latent: dict[str, Any] = {name: config.get(name) or 0 for name in LATENT} if config.get("kv_lora_rank") else {}
    wide = take("intermediate_size", "n_inner", "ffn_dim", default=4 * whole(hidden, f"{file}: hidden_size"))
    return ModelShape(
        name=str(config.get("_name_or_path") or file.resolve().parent.name),
        layers=take("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=take("num_attention_heads", "n_head"),
        vocab=take("vocab_size"),
        intermediate=wide,
        kv_heads=take("num_key_value_heads", default=0),
        head_dim=0 if latent else take("head_dim", default=0),  # there it is the width of the rotated part
        gated=gated,
        tied=take("tie_word_embeddings", default=kind not in ("", *FAMILIES)),
        experts=experts,
        experts_per_token=take("num_experts_per_tok", default=0),
        expert_intermediate=take("moe_intermediate_size", default=wide) if experts else 0,
        shared_intermediate=take("shared_expert_intermediate_size", default=0)
        or whole(config.get("n_shared_experts") or 0, f"{file}: n_shared_experts", least=0)
        * take("moe_intermediate_size", default=wide),
        dense_layers=take("first_k_dense_replace", default=0),
        positions=0 if gated else take("n_positions", "max_position_embeddings", default=0),
        dropout=not gated,
        **latent,
    )
