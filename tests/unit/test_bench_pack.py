"""Random packs of `bench`: sizes, places of images, labels."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoConfig

from swiftcp.config.bench import BenchConfig, validate_bench
from swiftcp.config.facts import Machine, read_shape_facts
from swiftcp.config.resolve import resolve
from swiftcp.data.batch import IGNORED_LABEL
from swiftcp.errors import ConfigError
from swiftcp.models.registry import family_of
from swiftcp.models.shapes import find_shape
from swiftcp.trainers.synthetic import image_grid, random_pack


@pytest.mark.parametrize(("num_tokens", "grid"), [(1024, (1, 64, 64)), (12, (1, 6, 8)), (7, (1, 2, 14))])
def test_an_image_has_exactly_its_tokens(num_tokens: int, grid: tuple[int, int, int]) -> None:
    assert image_grid(num_tokens, 2) == grid
    assert grid[1] * grid[2] == 4 * num_tokens


def test_a_pack_is_full_and_holds_every_image() -> None:
    hf_config = AutoConfig.from_pretrained(find_shape("qwen3_vl_2b"))
    family = family_of("qwen3_vl")
    geometry = family.tower_geometry(hf_config)["visual"]
    batch = random_pack(256, 2, 3, 12, family=family, hf_config=hf_config, geometry=geometry, seed=0)
    assert batch.cu_seqlens is not None and batch.cu_seqlens.tolist() == [0, 128, 256]
    assert batch.lengths == (128, 128) and not batch.padding_mask_BS.any()
    assert batch.visual is not None and batch.visual.grid_thw.tolist() == [[1, 6, 8]] * 3
    is_image = batch.input_ids_BS.flatten() == hf_config.image_token_id
    assert is_image.nonzero().flatten().tolist() == batch.visual.positions_V.tolist()
    assert is_image[:128].sum() == 24 and is_image[128:].sum() == 12
    # Every text token is predicted but the first of each sample, and images never are.
    assert int((batch.labels_BS != IGNORED_LABEL).sum()) == 256 - 36 - 2
    again = random_pack(256, 2, 3, 12, family=family, hf_config=hf_config, geometry=geometry, seed=0)
    assert torch.equal(again.input_ids_BS, batch.input_ids_BS)


def validated(*arguments: str, world_size: int = 1) -> BenchConfig:
    resolved = resolve(BenchConfig, arguments, environment={})
    return validate_bench(resolved, Machine(world_size, world_size, 0), read_shape_facts(find_shape(resolved.config.shape))).config


def test_defaults_follow_the_device() -> None:
    config = validated()
    assert (config.torch_dtype, config.device, config.num_tokens, config.use_distributed_optimizer) == ("float32", "cpu", 32768, False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--num_tokens", "1001", "--context_parallel_size", "2"), "set 1004"),
        (("--num_tokens", "1024", "--num_images", "2"), "set num_tokens to 2056 or more"),
        (("--recompute_granularity", "full", "--recompute_num_layers", "99"), "28 layers"),
        (("--attention_backend", "te"), "attention_backend te"),
        (("--shape", "qwen3_vl_1b"), "qwen3_vl_8b"),
        (("-pp", "2", "--virtual_pipeline_model_parallel_size", "2"), "num_packs 1 is no multiple .* set 2"),
        (("-tp", "4", "--sequence_parallel", "true", "--num_tokens", "1002"), "1002 is no multiple of CP x TP.* = 4: set 1004"),
    ],
)
def test_what_cannot_be_measured_is_told(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(*arguments, world_size=4 if {"--context_parallel_size", "-pp", "-tp"} & set(arguments) else 1)


def test_a_shape_may_be_a_path(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    assert find_shape(str(tmp_path)) == find_shape(str(tmp_path / "config.json")) == tmp_path / "config.json"
