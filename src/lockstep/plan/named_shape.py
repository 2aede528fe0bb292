"""The shape of a model that is named: by a packaged name, a Hugging Face config.json, a run's YAML, or its sizes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.config import ModelConfig
from lockstep.config.check import check
from lockstep.errors import LockstepError
from lockstep.plan.decoder_config import planner_shape
from lockstep.plan.shape import LATENT, ModelShape
from lockstep.plan.yaml_file import read_yaml

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
    path = Path(given)
    file = path / "config.json" if path.is_dir() else path
    if file.suffix == ".json":
        return _hugging_face(file)
    if file.suffix in (".yaml", ".yml"):
        content = _yaml(file)
        return _of_run(content["model"], file) if "model" in content else _explicit(content)
    table = _table()
    if (name := str(given).lower()) in table:
        return _explicit({"name": name, **table[name]})
    near = get_close_matches(name, list(table), n=1, cutoff=0.0)[0]
    raise LockstepError(
        f"unknown model {str(given)!r}: the nearest name is {near!r}. Known are {', '.join(table)}; "
        "a config.json, its directory, or a YAML file with the sizes works too."
    )


@cache
def _table() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = read_yaml(_LIBRARY, "model file")
    return content


def _yaml(file: Path) -> dict[str, Any]:
    content = read_yaml(file, "model file")
    if not isinstance(content, dict):
        raise LockstepError(f"model file {file} must be a mapping with layers, hidden, heads and vocab.")
    return content


def _of_run(model: Any, file: Path) -> ModelShape:
    """The shape of a training run's model: a new one's sizes, or what a loaded one names."""
    if isinstance(model, str):
        return model_shape(model)
    return planner_shape(check(ModelConfig, model, str(file)))


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


def _hugging_face(file: Path) -> ModelShape:
    if not file.exists():
        raise LockstepError(f"{file} does not exist: give a config.json, its directory or a model's name.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise LockstepError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise LockstepError(f"{file} must be a JSON object with the model's sizes, as in a Hugging Face config.json.")
    config = config.get("text_config", config)

    def take(*names: str, default: Any = None) -> Any:
        found = next((config[name] for name in names if config.get(name) is not None), default)
        if found is None:
            raise LockstepError(f"{file} has no {names[0]}: it is needed to plan.")
        return found

    experts = take("num_local_experts", "num_experts", "n_routed_experts", default=0)
    gated = "gpt2" not in config.get("model_type", "") and "opt" not in config.get("model_type", "")
    hidden = take("hidden_size", "n_embd")
    latent: dict[str, Any] = {name: config.get(name) or 0 for name in LATENT} if config.get("kv_lora_rank") else {}
    wide = take("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    return ModelShape(
        name=config.get("_name_or_path") or file.resolve().parent.name,
        layers=take("num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=take("num_attention_heads", "n_head"),
        vocab=take("vocab_size"),
        intermediate=wide,
        kv_heads=take("num_key_value_heads", default=0),
        head_dim=0 if latent else take("head_dim", default=0),  # there it is the width of the rotated part
        gated=gated,
        tied=take("tie_word_embeddings", default=not gated),
        experts=experts,
        experts_per_token=take("num_experts_per_tok", default=0),
        expert_intermediate=take("moe_intermediate_size", default=wide) if experts else 0,
        shared_intermediate=take("shared_expert_intermediate_size", default=0)
        or (config.get("n_shared_experts") or 0) * take("moe_intermediate_size", default=wide),
        dense_layers=take("first_k_dense_replace", default=0),
        positions=0 if gated else take("n_positions", "max_position_embeddings", default=0),
        dropout=not gated,
        **latent,
    )
