"""A model folder and rows as far as configuration looks at them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swiftcp.config import Machine, ResolvedConfig, TrainConfig, resolve, validate

ONE_CPU_RANK = Machine(world_size=1, local_world_size=1, num_gpus=0)


def write_model(folder: Path, **text_config: Any) -> Path:
    """A folder with the config.json of a small Qwen3-VL and an empty weights file."""
    folder.mkdir(parents=True)
    sizes = dict(num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, intermediate_size=128, max_position_embeddings=4096)
    sizes |= text_config
    vision = dict(patch_size=16, spatial_merge_size=2, deepstack_visual_indexes=[0, 1])
    config = dict(model_type="qwen3_vl", text_config=sizes, vision_config=vision)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model.safetensors").touch()
    return folder


def write_rows(path: Path) -> Path:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    return path


def arguments(folder: Path, *more: str) -> list[str]:
    """A complete command line for `sft`: model, rows and output under `folder`, made if they are not there."""
    if not (folder / "model").exists():
        write_model(folder / "model")
        write_rows(folder / "rows.jsonl")
    needed = ["--model", folder / "model", "--dataset", folder / "rows.jsonl", "--output_dir", folder / "out", "--device", "cpu"]
    return [*map(str, needed), *more]


def valid(folder: Path, *more: str, machine: Machine = ONE_CPU_RANK) -> ResolvedConfig[TrainConfig]:
    """Resolve and validate `arguments`."""
    return validate(resolve(TrainConfig, arguments(folder, *more), environment={}), machine)
