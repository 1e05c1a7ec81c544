"""The families that can be trained, by the `model_type` of their config.json."""

from __future__ import annotations

import importlib

from swiftcp.errors import ConfigError
from swiftcp.models.family import Family

_MODULES = {
    "qwen3_vl": "swiftcp.models.qwen3_vl",
    "qwen3_vl_moe": "swiftcp.models.qwen3_vl_moe",
    "qwen3_omni_moe": "swiftcp.models.qwen3_omni_moe",
    "qwen3_omni_moe_thinker": "swiftcp.models.qwen3_omni_moe",
    "qwen3_5": "swiftcp.models.qwen3_5",
    "qwen3_5_moe": "swiftcp.models.qwen3_5_moe",
}


def family_of(model_type: str) -> Family:
    """The family of a checkpoint.

    Raises:
        ConfigError: names the model types there are.
    """
    if model_type not in _MODULES:
        raise ConfigError(f"model_type {model_type!r} is not supported: use a checkpoint of one of {', '.join(sorted(_MODULES))}")
    return importlib.import_module(_MODULES[model_type]).FAMILY
