"""Adapters in PEFT's format into a stand-in model and out of it: names, shapes, and every tensor exactly once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from swiftcp.checkpoint.adapter_folder import adapted_layers, fill_trained, read_adapter, write_adapter
from swiftcp.config.tuner import AdapterFacts
from swiftcp.errors import ConfigError, WeightsError
from swiftcp.models.qwen3_vl.names import qwen3_vl_name_table
from swiftcp.parallel.place import WHOLE, TensorPlace
from tests.unit import folders

RANK = 2
LAYER = "language_model.decoder.layers.1."
SHAPES = {
    f"{LAYER}self_attention.linear_qkv.adapter.k_proj.lora_A": (RANK, folders.HIDDEN),
    f"{LAYER}self_attention.linear_qkv.adapter.k_proj.lora_B": (folders.GROUPS * folders.HEAD_DIM, RANK),
    f"{LAYER}self_attention.linear_proj.adapter.o_proj.lora_A": (RANK, folders.HEADS * folders.HEAD_DIM),
    f"{LAYER}self_attention.linear_proj.adapter.o_proj.lora_B": (folders.HIDDEN, RANK),
    "visual.merger.norm.weight": (6,),
}
STORED = {
    "base_model.model.model.language_model.layers.1.self_attn.k_proj.lora_A.weight",
    "base_model.model.model.language_model.layers.1.self_attn.k_proj.lora_B.weight",
    "base_model.model.model.language_model.layers.1.self_attn.o_proj.lora_A.weight",
    "base_model.model.model.language_model.layers.1.self_attn.o_proj.lora_B.weight",
    "base_model.model.model.visual.merger.norm.weight",
}
TABLE = qwen3_vl_name_table(folders.config())


def trained() -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def write(output: Path, tensors: dict[str, Tensor]) -> Path:
    facts = AdapterFacts(RANK, 5, 0.0, True)
    write_adapter(tensors, output, TABLE, WHOLE, device=torch.device("cpu"), facts=facts, base_model="/models/base")
    return output


def test_names_are_those_of_peft_and_modules_are_listed(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", trained())
    assert load_file(folder / "adapter_model.safetensors").keys() == STORED
    described = json.loads((folder / "adapter_config.json").read_text())
    layer = "model.language_model.layers.1.self_attn."
    assert described["target_modules"] == [f"{layer}k_proj", f"{layer}o_proj"]
    assert described["modules_to_save"] == ["model.visual.merger.norm"]
    assert (described["r"], described["lora_alpha"], described["use_rslora"]) == (RANK, 5, True)


def test_a_rank_of_two_reads_its_part(tmp_path: Path) -> None:
    whole = trained()
    folder = write(tmp_path / "adapter", whole)
    layers, saved = adapted_layers(read_adapter(folder))
    assert {layer.rpartition(".")[2] for layer in layers} == {"k_proj", "o_proj"} and saved == {"model.visual.merger.norm.weight"}
    for rank in range(2):
        cut = {name: 0 if name.endswith("k_proj.lora_B") else 1 for name in SHAPES if name.endswith(("k_proj.lora_B", "o_proj.lora_A"))}
        own = {name: tensor.chunk(2, cut[name])[rank] if name in cut else tensor for name, tensor in whole.items()}
        read = {name: torch.full(tensor.shape, float("nan")) for name, tensor in own.items()}
        fill_trained(read, read_adapter(folder), folder, TABLE, TensorPlace(rank, 2))
        assert all(torch.equal(read[name], tensor) for name, tensor in own.items())


def test_every_tensor_must_fit_exactly_once(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", trained())
    stored = read_adapter(folder)
    surplus, shorter = dict(trained()), {**stored, "model.visual.merger.norm.weight": torch.ones(5)}
    surplus["language_model.decoder.layers.0.mlp.linear_fc2.adapter.down_proj.lora_A"] = torch.ones(RANK, folders.FFN)
    lacking = {name: tensor for name, tensor in trained().items() if "o_proj" not in name}
    for target, tensors, message in (
        (surplus, stored, "1 missing: model.language_model.layers.0.mlp.down_proj.lora_A.weight"),
        (lacking, stored, "2 of no layer of the model"),
        (trained(), shorter, r"is \[5\], the model needs \[6\]"),
    ):
        with pytest.raises(WeightsError, match=message):
            fill_trained(target, tensors, folder, TABLE, WHOLE)


def test_files_that_are_no_adapter(tmp_path: Path) -> None:
    folder = write(tmp_path / "adapter", trained())
    save_file({"lora_A": torch.ones(1)}, folder / "adapter_model.safetensors")
    with pytest.raises(WeightsError, match=r"names must begin with base_model\.model\."):
        read_adapter(folder)
    (folder / "adapter_model.safetensors").write_bytes(b"x")
    with pytest.raises(WeightsError, match="damaged"):
        read_adapter(folder)
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "a.txt").touch()
    with pytest.raises(ConfigError, match="holds files that are no adapter"):
        write(tmp_path / "letters", trained())
