"""Which differences between a checkpoint and the run that resumes it change bits (contract C6 and C7)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError

_FREE = {
    "train.out", "train.eval_every", "train.eval_sequences", "train.log_every", "train.tensorboard",
    "train.save_every", "train.keep_last", "train.keep_every", "train.max_bad_steps", "train.export", "lora.merge",
    "data.sources", "data.max_bytes", "data.tokenizer", "data.text_field", "data.messages_field",
}  # fmt: skip
"""Keys that change no weight. The corpus and the tokenizer are compared by content, not by these names."""
_GROUPS = "train.gradient_groups"
_SECTIONS = ("model", "data", "train", "optimizer", "schedule", "lora")


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The keys (with both values) that make a resumed run differ from the one that was not killed.

    old, new: configurations as plain mappings (``model_dump``).
    """
    before, after = ({s: _pick(config, s) for s in _SECTIONS} for config in (old, new))
    flat_before, flat_after = dict(_flat(before, "")), dict(_flat(after, ""))
    if any(flat.get(_GROUPS) is not None for flat in (flat_before, flat_after)):
        for flat in (flat_before, flat_after):  # none given stands for as many as there are micro-batches
            flat[_GROUPS] = flat.get(_GROUPS) or flat.get("train.micro_batches")
    keys = sorted(flat_before.keys() | flat_after.keys())
    differing = [k for k in keys if flat_before.get(k) != flat_after.get(k) and k not in _FREE]
    if after["schedule"].get("kind") == before["schedule"].get("kind") == "constant":
        differing = [k for k in differing if k != "train.steps"]
    return [f"{k}: {flat_before.get(k)!r} -> {flat_after.get(k)!r}" for k in differing]


def same_corpus(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Whether two configurations name the same corpus, tokenised alike; its content may differ all the same."""
    before, after = ({k: v for k, v in _pick(c, "data").items() if k != "seq_len"} for c in (old, new))
    return before == after


def refuse_changes(checkpoint: Path, found: list[str]) -> None:
    """Raise if there are changes, naming each and the flag that accepts them."""
    if found:
        raise LockstepError(
            f"resuming {checkpoint} would not give the bits of the run that was not stopped, because of:\n  "
            + "\n  ".join(found)
            + "\nundo that, or accept a different result with --allow-changes"
        )


def _pick(config: Mapping[str, Any], section: str) -> Any:
    return config.get(section, {})


def _flat(value: Any, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        return [(prefix, list(value) if isinstance(value, tuple) else value)]
    return [pair for key, inner in value.items() for pair in _flat(inner, f"{prefix}.{key}" if prefix else key)]
