"""What rules and defaults refer to: the machine, and the model as its config.json describes it, read without `transformers`."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

from swiftcp.config.paths import missing
from swiftcp.errors import ConfigError

SUPPORTED_MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe", "qwen3_omni_moe", "qwen3_omni_moe_thinker", "qwen3_5", "qwen3_5_moe")
_PIXELS_PER_TOKEN = 32 * 32
"""Qwen3-VL: patches of 16 x 16 pixels, 2 x 2 of them merged."""


@dataclass(frozen=True)
class Machine:
    """The ranks of a run and this machine's devices."""

    world_size: int
    """Ranks on all machines."""
    local_world_size: int
    """Ranks on this machine."""
    num_gpus: int
    """GPUs that this machine's ranks may use."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model."""

    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    intermediate_size: int
    """Width of the feed-forward part of a layer; of its shared expert in Qwen3.5-MoE."""
    num_deepstack_levels: int
    """First layers of the decoder behind which visual features are added."""
    max_position_embeddings: int
    """Longest sequence the model was made for, in tokens."""
    pixels_per_token: int
    num_experts: int = 0
    """Of a layer that has any; 0 where all layers are dense."""
    moe_intermediate_size: int = 0
    """Width of an expert."""
    linear_num_key_heads: int = 0
    """Key heads of a gated delta net; 0 in a model that has none."""


def _read_json(folder: Path) -> dict:
    if not folder.is_dir():
        hint = ""
        if not folder.is_absolute() and len(folder.parts) == 2 and not folder.parent.exists():
            hint = f"; if it is a Hub id, download it first (hf download {folder} --local-dir DIR) and set model to that folder"
        raise ConfigError(missing("model folder", folder) + hint)
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model folder {folder} holds no config.json: set model to a Hugging Face folder")
    return _parse(path)


def _parse(path: Path) -> dict:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no valid JSON ({error}): download the model again") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is no JSON object: download the model again")
    return config


def read_model_facts(folder: Path) -> ModelFacts:
    """Raises: ConfigError: no folder, no config.json, an unsupported family, or a size that is missing."""
    return _facts(_read_json(folder), folder / "config.json")


def read_shape_facts(file: Path) -> ModelFacts:
    """Those of a lone config.json. Raises: ConfigError: an unsupported family, or a size that is missing."""
    return _facts(_parse(file), file)


def _facts(config: dict, file: Path) -> ModelFacts:
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise ConfigError(f"model_type '{model_type}' of {file} is not supported: use a model of {supported}")
    described = config.get("thinker_config", config)  # Qwen3-Omni has a part that is trained, and others
    text = described.get("text_config", {})
    vision = described.get("vision_config", {})
    try:
        num_attention_heads = int(text["num_attention_heads"])
        return ModelFacts(
            num_attention_heads=num_attention_heads,
            num_key_value_heads=int(text.get("num_key_value_heads") or num_attention_heads),
            num_hidden_layers=int(text["num_hidden_layers"]),
            intermediate_size=int(text["shared_expert_intermediate_size" if model_type == "qwen3_5_moe" else "intermediate_size"]),
            num_deepstack_levels=0 if model_type.startswith("qwen3_5") else len(vision["deepstack_visual_indexes"]),
            max_position_embeddings=int(text["max_position_embeddings"]),
            pixels_per_token=(int(vision["patch_size"]) * int(vision["spatial_merge_size"])) ** 2,
            num_experts=int(text.get("num_experts", text.get("num_local_experts", 0))),
            moe_intermediate_size=int(text.get("moe_intermediate_size", 0)),
            linear_num_key_heads=int(text.get("linear_num_key_heads", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} lacks a size or has a wrong one ({error}): download the model again") from None


def has_transformer_engine() -> bool:
    """Whether it is installed; whether it works is known once a rank imports it."""
    return importlib.util.find_spec("transformer_engine") is not None


def has_tensorboard() -> bool:
    """Whether it is installed."""
    return importlib.util.find_spec("tensorboard") is not None


def pixels_per_token(folder: str | None) -> int:
    """Pixels of an image that become one token; Qwen3-VL's number where the folder does not tell (validation says what is wrong)."""
    try:
        return read_model_facts(Path(folder)).pixels_per_token if folder else _PIXELS_PER_TOKEN
    except ConfigError:
        return _PIXELS_PER_TOKEN
