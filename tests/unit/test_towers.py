"""Spreading frames over the ranks of a context-parallel group."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from swiftcp.data.batch import VisualItems
from swiftcp.models.registry import family_of
from swiftcp.models.shapes import find_shape
from swiftcp.models.tower_layers import FrameLayout, LinearPatchEmbedding, frame_attention
from swiftcp.models.towers import VisionGeometry, encode, plan_tower_work, spread_units

GEOMETRY = VisionGeometry(merge_size=2, patch_values=3, num_layers=1, hidden_size=4, intermediate_size=8, prepare_grids=lambda grid: {})


def items(*grids: tuple[int, int, int]) -> VisualItems:
    num_patches = sum(t * h * w for t, h, w in grids)
    return VisualItems(
        patches_PD=torch.arange(num_patches * 3.0).view(num_patches, 3),
        grid_thw=torch.tensor(grids),
        positions_V=torch.arange(num_patches // 4),
    )


def test_dear_frames_go_to_the_rank_with_least_work() -> None:
    assert spread_units([1, 9, 4, 4, 2], 2) == [[0, 1], [2, 3, 4]]
    assert spread_units([5, 5, 5], 4) == [[0], [1], [2], []]
    assert spread_units([], 2) == [[], []]


def test_every_patch_is_encoded_on_one_rank_and_every_feature_found_again() -> None:
    visual = items((1, 4, 4), (2, 2, 4), (1, 6, 2), (1, 2, 2))
    works = [plan_tower_work(visual, GEOMETRY, num_ranks=3, rank=rank) for rank in range(3)]
    assert sum(work.inputs_PD.size(0) for work in works) == visual.patches_PD.size(0)
    # A stand-in tower: a feature is the mean of its four patches.
    gathered = []
    for work in works:
        features = work.inputs_PD.view(-1, 4, 3).mean(1)
        assert features.size(0) == work.num_features
        gathered.append(torch.cat([features, torch.full((work.gathered_rows - work.num_features, 3), -1.0)]))
    expected = visual.patches_PD.view(-1, 4, 3).mean(1)
    for work in works:
        assert torch.equal(torch.cat(gathered)[work.feature_rows_V], expected)


def test_a_video_is_spread_by_frames() -> None:
    works = [plan_tower_work(items((4, 4, 4)), GEOMETRY, num_ranks=2, rank=rank) for rank in range(2)]
    assert [work.units.tolist() for work in works] == [[[1, 4, 4], [1, 4, 4]]] * 2


def test_a_rank_without_work_has_an_empty_share() -> None:
    work = plan_tower_work(items((1, 4, 4)), GEOMETRY, num_ranks=2, rank=1)
    assert work.units.numel() == 0 and work.inputs_PD.shape == (0, 3) and work.prepared == {}
    assert (work.num_features, work.gathered_rows, work.feature_rows_V.tolist()) == (0, 4, [0, 1, 2, 3])


def test_a_microbatch_of_text_alone_leaves_nothing_to_do() -> None:
    for rank in range(2):
        work = plan_tower_work(None, GEOMETRY, num_ranks=2, rank=rank)
        assert (work.num_features, work.gathered_rows, work.feature_rows_V.numel(), work.inputs_PD.size(0)) == (0, 0, 0, 0)


def test_without_frames_each_trained_parameter_gets_one_gradient_of_zeros() -> None:
    class Linear(torch.nn.Linear):
        feature_shape = (2, 5)

        def parts(self) -> Iterator[torch.nn.Module]:
            yield self

    tower = Linear(3, 5)
    tower.bias.requires_grad_(False)
    features = encode(tower, plan_tower_work(None, GEOMETRY, num_ranks=1, rank=0), SimpleNamespace(size=lambda: 1), torch.float32)
    assert features.shape == (0, 2, 5)
    features.sum().backward()
    assert tower.weight.grad is not None and not tower.weight.grad.any() and tower.bias.grad is None


@pytest.fixture(scope="module")
def deep_tower() -> tuple[Any, VisionGeometry]:
    """Qwen3-VL's tower with all its blocks, but narrow."""
    hf_config = AutoConfig.from_pretrained(find_shape("qwen3_vl_2b"))
    narrow = {"hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    hf_config.vision_config.update(narrow)
    family = family_of("qwen3_vl")
    return family.build_towers(hf_config, "torch")["visual"], family.tower_geometry(hf_config)["visual"]


def order_of_gradients(tower: Any, geometry: VisionGeometry, visual: VisualItems | None) -> list[torch.nn.Parameter]:
    """Parameters in the order in which a backward pass finishes their gradients."""
    order: list[torch.nn.Parameter] = []
    hooks = [parameter.register_post_accumulate_grad_hook(order.append) for parameter in tower.parameters() if parameter.requires_grad]
    work = plan_tower_work(visual, geometry, num_ranks=1, rank=0)
    encode(tower, work, SimpleNamespace(size=lambda: 1), torch.float32).sum().backward()
    for hook in hooks:
        hook.remove()
    return order


def order_of_buckets(tower: Any, order: list[torch.nn.Parameter], size: int) -> list[int]:
    """Buckets of `size` parameters, cut as for overlapped reduction, in the order in which they are complete."""
    trained = [parameter for parameter in tower.parameters() if parameter.requires_grad][::-1]
    bucket = {parameter: number // size for number, parameter in enumerate(trained)}
    last = {bucket[parameter]: place for place, parameter in enumerate(order)}
    return sorted(last, key=lambda number: last[number])


@pytest.mark.parametrize("frozen", [(), ("merger", "deepstack_merger_list"), ("blocks", "patch_embed", "pos_embed")], ids=str)
def test_without_frames_buckets_of_gradients_are_complete_in_the_same_order(
    deep_tower: tuple[Any, VisionGeometry], frozen: tuple[str, ...]
) -> None:
    tower, geometry = deep_tower
    for name, parameter in tower.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    visual = VisualItems(torch.randn(16, geometry.patch_values), torch.tensor([[1, 4, 4]]), torch.arange(4))
    with_frames, without = (order_of_gradients(tower, geometry, items) for items in (visual, None))
    assert len(with_frames) == len(without) == sum(parameter.requires_grad for parameter in tower.parameters())
    for size in (12, 20, 40, 80):
        assert order_of_buckets(tower, without, size) == order_of_buckets(tower, with_frames, size)


def test_the_patch_embedding_equals_its_convolution() -> None:
    torch.manual_seed(0)
    convolution = torch.nn.Conv3d(3, 8, kernel_size=(2, 4, 4), stride=(2, 4, 4))
    patches = torch.randn(5, 3 * 2 * 4 * 4)
    expected = convolution(patches.view(5, 3, 2, 4, 4)).view(5, 8)
    assert (LinearPatchEmbedding(convolution)(patches) - expected).abs().max() < 1e-5


def test_attention_stays_inside_each_frame() -> None:
    generator = torch.Generator().manual_seed(0)
    sizes = [4, 8, 4, 12, 8]
    query, key, value = (torch.randn(sum(sizes), 2, 16, generator=generator) for _ in range(3))
    output = frame_attention(query, key, value, FrameLayout.of(sizes), 0.25)
    start = 0
    for size in sizes:
        here = slice(start, start + size)
        scores = torch.einsum("qhd,khd->hqk", query[here], key[here]) * 0.25
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[here])
        assert (output[here] - expected).abs().max() < 1e-6
        start += size
