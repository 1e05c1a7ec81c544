"""The positions of Qwen3-VL, dense and MoE, equal those of transformers, for every modality and mix."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftcp.models.qwen3_vl.positions import qwen3_vl_position_ids

TEXT, START, END, IMAGE, VIDEO = 7, 90, 91, 92, 93


@functools.cache
def _reference_model(family: str) -> Any:
    import transformers

    text = dict(vocab_size=128, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    text |= dict(num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16) if family == "Qwen3VLMoe" else {}
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=16, deepstack_visual_indexes=[0])
    config = getattr(transformers, f"{family}Config")(text_config=text, vision_config=vision, image_token_id=IMAGE, video_token_id=VIDEO)
    return getattr(transformers, f"{family}Model")(config)


def _text(length: int) -> list[int]:
    return [TEXT] * length


def _image(rows: int, columns: int) -> list[int]:
    return [START] + [IMAGE] * (rows * columns // 4) + [END]


def _video(frames: int, rows: int, columns: int) -> list[int]:
    return (_text(3) + [START] + [VIDEO] * (rows * columns // 4) + [END]) * frames


def _ours(ids: list[int], images: Tensor | None, videos: Tensor | None) -> Tensor:
    return qwen3_vl_position_ids(torch.tensor(ids), images, videos, image_token_id=IMAGE, video_token_id=VIDEO, spatial_merge_size=2)


CASES = {
    "text": (_text(9), [], []),
    "one_token": (_text(1), [], []),
    "image": (_text(3) + _image(4, 6) + _text(5), [[1, 4, 6]], []),
    "image_first_and_last": (_image(8, 4), [[1, 8, 4]], []),
    "three_images": (
        _image(4, 4) + _text(2) + _image(2, 12) + _image(6, 6) + _text(4),
        [[1, 4, 4], [1, 2, 12], [1, 6, 6]],
        [],
    ),
    "case_10_video": (_text(4) + _video(3, 4, 4) + _text(3), [], [[3, 4, 4]]),
    "two_videos": (_video(2, 4, 6) + _text(1) + _video(1, 2, 2), [], [[2, 4, 6], [1, 2, 2]]),
    "video_then_image": (_text(2) + _video(2, 6, 4) + _image(4, 8) + _text(3), [[1, 4, 8]], [[2, 6, 4]]),
    "image_then_video": (_image(4, 8) + _text(2) + _video(2, 6, 4) + _text(3), [[1, 4, 8]], [[2, 6, 4]]),
}


@pytest.mark.parametrize("family", ["Qwen3VL", "Qwen3VLMoe"])
@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, family: str) -> None:
    ids, image_grids, video_grids = CASES[name]
    images, videos = (torch.tensor(grids) if grids else None for grids in (image_grids, video_grids))
    ids_BL = torch.tensor([ids])
    kinds = (ids_BL == IMAGE).long() + 2 * (ids_BL == VIDEO).long()
    expected, _ = _reference_model(family).get_rope_index(ids_BL, kinds, images, videos)
    assert torch.equal(_ours(ids, images, videos), expected[:, 0])


def test_literal_positions_of_an_image() -> None:
    positions = _ours(_text(1) + _image(2, 6) + _text(1), torch.tensor([[1, 2, 6]]), None)
    assert positions.tolist() == [[0, 1, 2, 2, 2, 5, 6], [0, 1, 2, 2, 2, 5, 6], [0, 1, 2, 3, 4, 5, 6]]


@pytest.mark.parametrize(
    ("ids", "grids"),
    [
        (_text(2) + _image(4, 4), [[1, 4, 6]]),
        (_text(2), [[1, 4, 4]]),
        (_image(4, 4) + _image(4, 4), [[1, 4, 4]]),
    ],
)
def test_placeholders_that_do_not_fit_the_grids(ids: list[int], grids: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"does not fit|more media"):
        _ours(ids, torch.tensor(grids), None)
