"""The base of every configuration section: strict, immutable, closed to unknown keys."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """One part of the configuration. Every field has a default or is required, and a description."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )
