"""What a checkpoint folder says before its weights are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftcp.errors import ConfigError
from swiftcp.trainers.setup import load_source


def test_source_of_a_checkpoint(tiny_qwen3_vl: Path) -> None:
    source = load_source(tiny_qwen3_vl)
    assert source.family.model_type == "qwen3_vl" and source.geometry["visual"].num_layers == source.hf_config.vision_config.depth
    assert source.processor.tokenizer.is_fast


def test_a_folder_without_processor_is_named(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_qwen3_vl / name).read_bytes())
    with pytest.raises(ConfigError, match=f"model {tmp_path} cannot be read"):
        load_source(tmp_path)


def test_a_folder_without_tokenizer_is_named(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_qwen3_vl / "config.json").read_bytes())
    with pytest.raises(ConfigError, match=f"model {tmp_path} holds no tokenizer"):
        load_source(tmp_path)


def test_a_family_that_is_not_built_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ConfigError, match="model_type 'llama' is not supported"):
        load_source(tmp_path)


def test_code_of_the_folder_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Config: pass\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_source(tmp_path)
    assert not (tmp_path / "ran").exists()
