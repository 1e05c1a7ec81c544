"""A stand-in for the model and its checkpoint: the names and shapes of a Qwen3-VL of two layers, without building one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from swiftcp.models.qwen3_vl.names import qwen3_vl_name_table

LAYERS, HIDDEN, FFN, HEADS, GROUPS, HEAD_DIM, VOCABULARY, PADDED = 2, 8, 12, 4, 2, 4, 199, 200
TOWER = {"patch_embed.proj.weight": (6, 3, 2, 2, 2), "patch_embed.proj.bias": (6,), "merger.norm.weight": (6,), "pos_embed.weight": (4, 6)}


def config(tied: bool = False) -> Any:
    """The fields of `Qwen3VLConfig` that the name table reads."""
    text = SimpleNamespace(num_hidden_layers=LAYERS, vocab_size=VOCABULARY, num_key_value_heads=GROUPS, head_dim=HEAD_DIM)
    return SimpleNamespace(text_config=text, tie_word_embeddings=tied)


def _model_shapes(tied: bool, fused: bool) -> dict[str, tuple[int, ...]]:
    norms = (
        ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
        if fused
        else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
    )
    layer = {
        norms[0]: (HIDDEN,),
        norms[1]: (HIDDEN,),
        "self_attention.linear_qkv.weight": ((HEADS + 2 * GROUPS) * HEAD_DIM, HIDDEN),
        "self_attention.q_layernorm.weight": (HEAD_DIM,),
        "self_attention.k_layernorm.weight": (HEAD_DIM,),
        "self_attention.linear_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.linear_fc1.weight": (2 * FFN, HIDDEN),
        "mlp.linear_fc2.weight": (HIDDEN, FFN),
    }
    shapes: dict[str, tuple[int, ...]] = {"language_model.embedding.word_embeddings.weight": (PADDED, HIDDEN)}
    shapes |= {f"language_model.decoder.layers.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    shapes |= {"language_model.decoder.final_layernorm.weight": (HIDDEN,)}
    shapes |= {} if tied else {"language_model.output_layer.weight": (PADDED, HIDDEN)}
    return shapes | {f"visual.{name}": shape for name, shape in TOWER.items()}


def model(tied: bool = False, fused: bool = False, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A module with the parameters of `MultimodalGPTModel` (with Transformer Engine's names if `fused`), all NaN."""
    return _module(_model_shapes(tied, fused), dtype)


def model_part(tied: bool, *, tp_size: int, stage: int, num_stages: int) -> nn.Module:
    """What one tensor-parallel rank of one pipeline stage holds of it: one layer a stage where there are two."""
    shapes = _model_shapes(tied, fused=False)
    rules = qwen3_vl_name_table(config(tied)).pair(list(shapes))
    last = stage == num_stages - 1
    if tied and num_stages > 1:
        shapes["language_model.output_layer.weight"] = (PADDED, HIDDEN)

    def is_here(name: str) -> bool:
        if ".layers." in name:
            return num_stages == 1 or f".layers.{stage}." in name
        return last if "output_layer" in name or "final_layernorm" in name else stage == 0

    def cut(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        dim = 0 if name not in rules else rules[name].parallel_dim
        return tuple(length // tp_size if i == dim else length for i, length in enumerate(shape))

    return _module({name: cut(name, shape) for name, shape in shapes.items() if is_here(name)}, torch.float32)


def _module(shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> nn.Module:
    root = nn.Module()
    for name, shape in shapes.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(leaf, nn.Parameter(torch.full(shape, float("nan"), dtype=dtype)))
    return root


def tensors(tied: bool = False, dtypes: tuple[torch.dtype, ...] = (torch.float32,)) -> dict[str, Tensor]:
    """What `save_pretrained` would write, with random values; the types go round over the tensors in order."""
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj.weight": (GROUPS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj.weight": (GROUPS * HEAD_DIM, HIDDEN),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (FFN, HIDDEN),
        "mlp.up_proj.weight": (FFN, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, FFN),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.language_model.embed_tokens.weight": (VOCABULARY, HIDDEN),
        "model.language_model.norm.weight": (HIDDEN,),
    }
    shapes |= {f"model.language_model.layers.{number}.{name}": shape for number in range(LAYERS) for name, shape in layer.items()}
    shapes |= {} if tied else {"lm_head.weight": (VOCABULARY, HIDDEN)}
    shapes |= {f"model.visual.{name}": shape for name, shape in TOWER.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtypes[i % len(dtypes)]) for i, (name, shape) in enumerate(shapes.items())}


def write_folder(folder: Path, stored: Mapping[str, Tensor], num_shards: int = 1) -> Path:
    """A Hugging Face folder: shards, index, configuration and tokenizer files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "qwen3_vl",  "dtype": "bfloat16"}')
    (folder / "tokenizer.json").write_text('{"odd   spacing": true}\n')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "generation_config.json").write_text("{}")
    if num_shards == 1:
        save_file(dict(stored), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(stored)
    weight_map = {name: f"model-{i % num_shards + 1:05d}-of-{num_shards:05d}.safetensors" for i, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({name: stored[name] for name in names if weight_map[name] == file}, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_folder(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, read with safetensors alone."""
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def assert_same_bits(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert got.keys() == expected.keys(), sorted(got.keys() ^ expected.keys())
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, name
        assert got[name].shape == tensor.shape, name
        same = torch.equal(got[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8))
        assert same, name
