"""Qwen3-Omni's positions equal those of transformers, for every modality and mix, also between whole positions."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoePreTrainedModelForConditionalGeneration as Oracle
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import _get_feat_extract_output_lengths as encoded_length

from swiftcp.models.qwen3_omni_moe.positions import OmniTokens, qwen3_omni_position_ids

TEXT, VISION_START, VISION_END, IMAGE, VIDEO, AUDIO_START, AUDIO_END, AUDIO = 7, 90, 91, 92, 93, 94, 95, 96
TOKENS = OmniTokens(IMAGE, VIDEO, AUDIO, position_id_per_seconds=13, spatial_merge_size=2)


def _oracle(ids: list[int], images: Any, videos: Any, sounds: Any, seconds: Any, heard: bool) -> torch.Tensor:
    config = SimpleNamespace(
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        audio_token_id=AUDIO,
        vision_start_token_id=VISION_START,
        audio_start_token_id=AUDIO_START,
        position_id_per_seconds=13,
        audio_config=SimpleNamespace(n_window=50),
    )
    model: Any = object.__new__(Oracle)
    model.__dict__ |= {"config": config, "spatial_merge_size": 2}
    ids_BL = torch.tensor([ids])
    positions, _ = model.get_rope_index(ids_BL, images, videos, torch.ones_like(ids_BL), heard, sounds, seconds)
    return positions[:, 0]


def _sound(frames: int) -> list[int]:
    return [AUDIO_START] + [AUDIO] * encoded_length(frames) + [AUDIO_END]


def _grid(token: int, grid: list[int]) -> list[int]:
    return [VISION_START] + [token] * (grid[0] * grid[1] * grid[2] // 4) + [VISION_END]


def _heard(grid: list[int], frames: int, seconds: float) -> list[int]:
    """As the processor interleaves them."""
    size = grid[1] * grid[2] // 4
    times = [(number // size * seconds * 13, VIDEO) for number in range(grid[0] * size)]
    times += [(number, AUDIO) for number in range(encoded_length(frames))]
    return [VISION_START, AUDIO_START, *(token for _, token in sorted(times, key=lambda pair: pair[0])), AUDIO_END, VISION_END]


TEXTS = [TEXT] * 3
# name: (ids, image grids, video grids, frames of sounds, seconds of a video's grid, whether videos are heard)
CASES: dict[str, tuple[Any, ...]] = {
    "text": ([TEXT] * 9, [], [], [], [], False),
    "image": (TEXTS + _grid(IMAGE, [1, 4, 6]) + TEXTS, [[1, 4, 6]], [], [], [], False),
    "wide_image_last": (TEXTS + _grid(IMAGE, [1, 4, 16]), [[1, 4, 16]], [], [], [], False),
    "video": (TEXTS + _grid(VIDEO, [3, 4, 4]) + TEXTS, [], [[3, 4, 4]], [], [1.0], False),
    "video_between_positions": (_grid(VIDEO, [4, 4, 4]) + TEXTS, [], [[4, 4, 4]], [], [2 / 3], False),
    "audio": (TEXTS + _sound(170) + TEXTS, [], [], [170], [], False),
    "short_audio": (_sound(70) + TEXTS + _sound(240), [], [], [70, 240], [], False),
    "audio_and_image": (_sound(250) + _grid(IMAGE, [1, 4, 4]) + TEXTS, [[1, 4, 4]], [], [250], [], False),
    "everything": (
        TEXTS + _sound(99) + _grid(VIDEO, [2, 4, 8]) + _grid(IMAGE, [1, 8, 4]) + TEXTS + _sound(100) + _grid(VIDEO, [1, 4, 4]) + TEXTS,
        [[1, 8, 4]],
        [[2, 4, 8], [1, 4, 4]],
        [99, 100],
        [1.0, 0.5],
        False,
    ),
    "heard_video": (TEXTS + _heard([3, 4, 4], 300, 1.0) + TEXTS, [], [[3, 4, 4]], [300], [1.0], True),
    "heard_video_whose_sound_ends_first": (_heard([5, 4, 8], 120, 0.7) + TEXTS, [], [[5, 4, 8]], [120], [0.7], True),
    "heard_video_of_one_grid": (_heard([1, 8, 40], 20, 2.0) + TEXTS, [], [[1, 8, 40]], [20], [2.0], True),
    "heard_videos_audio_and_image": (
        _grid(IMAGE, [1, 4, 4]) + _heard([2, 4, 4], 150, 1.0) + TEXTS + _sound(130) + _heard([2, 4, 8], 210, 1.1),
        [[1, 4, 4]],
        [[2, 4, 4], [2, 4, 8]],
        [150, 130, 210],
        [1.0, 1.1],
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str) -> None:
    ids, *media, heard = CASES[name]
    images, videos, sounds, seconds = (torch.tensor(values) if values else None for values in media)
    ours = qwen3_omni_position_ids(torch.tensor(ids), images, videos, seconds, TOKENS)
    assert torch.equal(ours, _oracle(ids, images, videos, sounds, seconds, heard))


def test_many_rates_and_lengths_of_heard_videos() -> None:
    for frames, seconds, grids in itertools.product((40, 100, 333, 1201), (0.4, 1.0, 1.0041, 2.0), (1, 2, 7)):
        grid = [grids, 4, 12]
        ids = TEXTS + _heard(grid, frames, seconds) + TEXTS
        videos, sounds, rates = torch.tensor([grid]), torch.tensor([frames]), torch.tensor([seconds])
        ours = qwen3_omni_position_ids(torch.tensor(ids), None, videos, rates, TOKENS)
        assert torch.equal(ours, _oracle(ids, None, videos, sounds, rates, True)), (frames, seconds, grids)


@pytest.mark.parametrize(
    ("ids", "grids"), [(TEXTS + _grid(IMAGE, [1, 4, 4]), [[1, 4, 6]]), (TEXTS, [[1, 4, 4]]), (_grid(IMAGE, [1, 4, 4]) * 2, [[1, 4, 4]])]
)
def test_placeholders_that_do_not_fit_the_grids(ids: list[int], grids: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"does not fit|more images"):
        qwen3_omni_position_ids(torch.tensor(ids), torch.tensor(grids), None, None, TOKENS)
