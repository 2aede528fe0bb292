"""Configuration in and out: a YAML file, then `key=value` overrides, then the check against the schema."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lockstep.config import strict_yaml
from lockstep.config.check import check
from lockstep.config.names import fields, plain_types
from lockstep.config.schema import DEFAULT_MODEL, Config
from lockstep.errors import LockstepError


def load_config(path: str | os.PathLike[str] | None = None, overrides: list[str] | None = None) -> Config:
    """The configuration of a YAML file (none: the defaults), with `a.b=value` overrides on top.

    A value is read as a plain YAML scalar, or as YAML when it begins with `[`, `{` or a quote; where only text
    fits, `1` is text. Of two overrides of one key the later counts. Raises `LockstepError` for whatever is wrong,
    naming the key.
    """
    tree = {} if path is None else _read(Path(path))
    if any(override.startswith("model.") for override in overrides or []):
        tree.setdefault("model", dict(DEFAULT_MODEL))  # what is not overridden keeps its default, as in every section
    for override in overrides or []:
        _set(tree, override)
    source = " and ".join([*([str(path)] if path is not None else []), *(["the command line"] if overrides else [])])
    return check(Config, tree, source or "the default configuration")


def save_config(config: Config, path: str | os.PathLike[str]) -> None:
    """Write the resolved configuration, every default included; `load_config` gives an equal one back."""
    text = strict_yaml.dump(config.model_dump(mode="json"))
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LockstepError(f"cannot write the configuration to {path}: {error.strerror or error}") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise LockstepError(f"there is no configuration file {path}") from error
    except UnicodeDecodeError as error:
        raise LockstepError(f"{path} is not a YAML file: byte {error.start} is not UTF-8 text") from error
    except OSError as error:
        raise LockstepError(f"cannot read the configuration file {path}: {error.strerror or error}") from error
    tree = strict_yaml.parse(text, str(path))
    if tree is None:
        raise LockstepError(
            f"{path} is empty: write what differs from the defaults, or leave the file out to take them"
        )
    if not isinstance(tree, dict):
        raise LockstepError(f"{path} holds {type(tree).__name__} {tree!r:.60}: expected a mapping, such as `train:`")
    if "plan" in tree and "layout" in tree:
        raise LockstepError(f"{path} is a plan, as `lockstep plan` writes it, and no configuration: give it as --plan")
    return tree


def _set(tree: dict[str, Any], override: str) -> None:
    """Put one `a.b=value` into the tree, making the mappings on the way."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise LockstepError(f"--set {override}: expected KEY=VALUE with a dotted key, such as --set train.steps=100")
    for depth, part in enumerate(parts[:-1], 1):
        if tree.get(part) is None:
            tree[part] = {}
        if not isinstance(tree[part], dict):
            above = ".".join(parts[:depth])
            raise LockstepError(f"--set {override}: `{above}` is {tree[part]!r}, a single value without keys below it")
        tree = tree[part]
    tree[parts[-1]] = _value(".".join(parts), text.strip(), f"--set {override}")


def _value(key: str, text: str, source: str) -> Any:
    if text[:1] in ("[", "{", '"', "'"):
        return strict_yaml.parse(text, source)
    value = strict_yaml.parse_scalar(text)
    kinds = plain_types(dict(fields(Config))[key].annotation) if key in dict(fields(Config)) else set()
    return text if str in kinds and value is not None and type(value) not in kinds else value
