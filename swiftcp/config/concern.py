"""What every concern of the configuration is made from."""

from __future__ import annotations

import os
from typing import Annotated, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict


def _path_text(value: object) -> object:
    """Text with ~ expanded; also of a path object, from Python."""
    return os.path.expanduser(value) if isinstance(value, str | os.PathLike) else value  # noqa: PTH111 (text stays as it was written)


PathText = Annotated[str, BeforeValidator(_path_text)]


class Concern(BaseModel):
    """Base of all configuration: no unknown keys, no NaN, values fixed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    panel: ClassVar[str] = ""
    """Heading of this concern's options in --help."""
