"""Qwen3-Omni's audio tower equals that of transformers row by row, in windows that any rank may encode, beside whatever else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeAudioEncoder, _get_feat_extract_output_lengths

from swiftcp.data.batch import AudioItems
from swiftcp.models.qwen3_omni_moe.tower import AudioGeometry, Qwen3OmniAudioTower, convolved
from swiftcp.models.towers import encode, plan_tower_work

MELS, HIDDEN, WIDTH = 16, 32, 24
GEOMETRY = AudioGeometry(
    num_mel_bins=MELS, chunk_frames=100, window_chunks=2, num_layers=2, hidden_size=HIDDEN, intermediate_size=48, num_channels=4
)
ONE_RANK: Any = SimpleNamespace(size=lambda: 1)
ROWS = [[70], [99, 30], [100], [240, 70], [41, 201, 200], [650], [55]]
"""Frames of the sounds of each row."""


def config() -> Any:
    return AutoConfig.for_model(
        "qwen3_omni_moe_audio_encoder",
        num_mel_bins=MELS,
        encoder_layers=2,
        encoder_attention_heads=2,
        encoder_ffn_dim=48,
        d_model=HIDDEN,
        output_dim=WIDTH,
        n_window_infer=200,
        conv_chunksize=3,
        downsample_hidden_size=4,
    )


@pytest.fixture(scope="module")
def towers() -> tuple[Any, Any]:
    """(ours, that of transformers) with the same weights, biases included."""
    torch.manual_seed(0)
    ours, theirs = (kind._from_config(config(), attn_implementation="eager") for kind in (Qwen3OmniAudioTower, Qwen3OmniMoeAudioEncoder))
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def features(rows: list[list[int]]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(sum(row), MELS, generator=generator) for row in rows]


def items(rows: list[list[int]]) -> AudioItems:
    frames, longest = [frames for row in rows for frames in row], [max(row) for row in rows for _ in row]
    num_features = sum(map(int, _get_feat_extract_output_lengths(torch.tensor(frames))))
    return AudioItems(torch.cat(features(rows)), torch.tensor(frames), torch.tensor(longest), torch.arange(num_features))


def test_all_rows_at_once_equal_transformers_row_by_row(towers: tuple[Any, Any]) -> None:
    ours, theirs = towers
    expected = [theirs(own.T, feature_lens=torch.tensor(row)).last_hidden_state for row, own in zip(ROWS, features(ROWS), strict=True)]
    got = encode(ours, plan_tower_work(items(ROWS), GEOMETRY, num_ranks=1, rank=0), ONE_RANK, torch.float32)[:, 0]
    assert (got - torch.cat(expected)).abs().max() < 2e-5 * torch.cat(expected).abs().max()
    torch.cat(expected).square().sum().backward()
    got.square().sum().backward()
    for name, other in theirs.named_parameters():
        parameter = ours.get_parameter(name)
        assert (parameter.grad - other.grad).abs().max() <= 1e-4 * other.grad.abs().max() + 1e-5, name
    ours.zero_grad()


def test_short_chunks_alone_and_beside_longer_ones_differ_in_transformers(towers: tuple[Any, Any]) -> None:
    """The reason for the masks: without them this test and the one before contradict each other."""
    _, theirs = towers
    (short,) = features([[70]])
    alone = theirs(short.T, feature_lens=torch.tensor([70])).last_hidden_state
    beside = theirs(torch.cat([short, torch.zeros(100, MELS)]).T, feature_lens=torch.tensor([70, 100])).last_hidden_state
    assert (alone - beside[: len(alone)]).abs().max() > 1e-3


def test_windows_are_spread_and_every_feature_is_found_again(towers: tuple[Any, Any]) -> None:
    ours, _ = towers
    expected = encode(ours, plan_tower_work(items(ROWS), GEOMETRY, num_ranks=1, rank=0), ONE_RANK, torch.float32)
    works = [plan_tower_work(items(ROWS), GEOMETRY, num_ranks=3, rank=rank) for rank in range(3)]
    assert sum(work.inputs_PD.size(0) for work in works) == items(ROWS).features_FM.size(0)
    costs = [sum(GEOMETRY.multiplications(unit) for unit in work.units.tolist()) for work in works]
    assert max(costs) < 1.5 * min(costs)
    gathered = []
    for work in works:
        own = ours.encode(work.inputs_PD, work.units, work.prepared)
        gathered.append(torch.cat([own, torch.zeros(work.gathered_rows - len(own), 1, WIDTH)]))
    for work in works:
        assert (torch.cat(gathered)[work.feature_rows_V] - expected).abs().max() < 1e-5 * expected.abs().max()


def test_without_sound_every_parameter_gets_zeros_and_order_is_that_of_a_real_pass(towers: tuple[Any, Any]) -> None:
    ours, _ = towers
    orders = []
    for sound in (items([[130]]), None):
        order: list[Any] = []
        hooks = [parameter.register_post_accumulate_grad_hook(order.append) for parameter in ours.parameters()]
        encode(ours, plan_tower_work(sound, GEOMETRY, num_ranks=1, rank=0), ONE_RANK, torch.float32).sum().backward()
        for hook in hooks:
            hook.remove()
        orders.append(
            [part for parameter in order for part, module in enumerate(ours.parts()) if any(parameter is p for p in module.parameters())]
        )
        assert len(order) == sum(1 for _ in ours.parameters())
    assert orders[0] == orders[1]
    ours.zero_grad()


def test_lengths_are_those_of_transformers() -> None:
    for frames in range(1, 1200):
        expected = int(_get_feat_extract_output_lengths(torch.tensor(frames)))
        sound = AudioItems(torch.empty(0, MELS), torch.tensor([frames]), torch.tensor([frames]), torch.empty(0, dtype=torch.int64))
        assert sum(GEOMETRY.num_features(unit) for unit in GEOMETRY.units(sound).tolist()) == expected
    assert convolved(100) == 13
