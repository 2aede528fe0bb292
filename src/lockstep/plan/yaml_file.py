"""A YAML file that a person gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from lockstep.errors import LockstepError


def read_yaml(path: Path, what: str) -> Any:
    """The file's content. what: the file's part in the error. Raises LockstepError for what is no YAML, or cannot be
    read."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LockstepError(f"{what} {path} cannot be read as YAML: {error}") from error
