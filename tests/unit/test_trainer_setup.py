"""What a checkpoint folder says before its weights are read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from swiftcp.errors import ConfigError
from swiftcp.trainers import setup
from swiftcp.trainers.setup import load_source
from tests.distributed.training_harness import train_config


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


def test_a_tokenizer_with_tokens_that_the_model_lacks_is_named(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_qwen3_vl, tmp_path, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    vocab_size = json.loads((tmp_path / "config.json").read_text())["text_config"]["vocab_size"]
    tokenizer.add_tokens([f"<added {number}>" for number in range(vocab_size + 1 - len(tokenizer))])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"token '<added .*>' with id {vocab_size}, but config.json says vocab_size {vocab_size}"):
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


@pytest.mark.parametrize(("cp_comm_type", "sizes"), [("p2p", None), ("a2a+p2p", [4, 2])])
def test_group_sizes_without_their_communication_make_no_groups(
    cp_comm_type: str, sizes: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has no effect must not fail either: megatron-core insists that the product is the context-parallel size."""

    class MeshAskedError(Exception):
        pass

    def build_mesh(device: Any, **keys: Any) -> None:
        raise MeshAskedError(keys["hierarchical_context_parallel_sizes"])

    monkeypatch.setattr(setup.cpu_shim, "install", lambda: None)
    monkeypatch.setattr(setup, "start_process_group", lambda *arguments: None)
    monkeypatch.setattr(setup, "build_mesh", build_mesh)
    with pytest.raises(MeshAskedError) as asked:
        setup.start_ranks(train_config(tmp_path, cp_comm_type=cp_comm_type, hierarchical_context_parallel_sizes=[4, 2]))
    assert asked.value.args == (sizes,)
