"""A sample's ids are those of the checkpoint's own processor, its length is known from headers alone, its labels are what is trained."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from torch import Tensor

from swiftcp.data.batch import IGNORED_LABEL, Sample
from swiftcp.data.encode import RowEncoder, _label
from swiftcp.data.rows import ImagePart, RowError, VideoPart, parse_row
from swiftcp.data.visuals import MediaLimits
from swiftcp.errors import ConfigError

from .data_fixtures import chat, encoder, picture, processor, turn_video, write_video


@pytest.fixture(scope="module")
def media(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures and videos; tests may add files, but change none."""
    tmp_path = tmp_path_factory.mktemp("media")
    for name, size in {
        "wide": (200, 100),
        "tall": (60, 150),
        "small": (31, 33),
        "tiny": (8, 8),
        "dot": (1, 1),
        "large": (900, 700),
    }.items():
        picture(*size).save(tmp_path / f"{name}.png")
    for num_frames in (1, 2, 9, 20, 21):
        write_video(tmp_path / f"{num_frames}.mp4", num_frames=num_frames, fps=8)
    write_video(tmp_path / "portrait.mp4", num_frames=13, size=(96, 160), fps=4)
    return tmp_path


ROWS: dict[str, dict[str, Any]] = {
    "text": chat("What is 1 + 2?", "3 naïve 🙂"),
    "image": chat("<image>What is this?", images=["wide.png"]),
    "three_images": chat("<image>and<image>\n<image>?", images=["small.png", "tall.png", "large.png"]),
    "tiny_images": chat("<image><image>?", images=["tiny.png", "dot.png"]),
    "image_in_each_turn": {
        "messages": [*chat("<image>a", "b")["messages"], *chat("c<image>", "d")["messages"]],
        "images": ["wide.png", "tall.png"],
        "system": "Be brief.",
    },
    "video": chat("<video>What happens?", videos=["20.mp4"]),
    "odd_video": chat("<video>What happens?", videos=["21.mp4"]),
    "two_frames": chat("<video>", videos=["2.mp4"]),
    "two_videos": chat("<video>a<video>", videos=["portrait.mp4", "9.mp4"]),
    "image_and_video": chat("<video>a<image>b<video>c<image>", videos=["9.mp4", "20.mp4"], images=["tall.png", "wide.png"]),
}


def encode(raw: dict[str, Any], folder: Path, **options: Any) -> Sample:
    return encoder(**options).encode(parse_row(raw, folder / "d.jsonl", 1), 5)


def refused(raw: dict[str, Any], folder: Path, **options: Any) -> str:
    """The reason, which must be the same whether the length or the sample is asked for."""
    row, chosen = parse_row(raw, folder / "d.jsonl", 4), encoder(**options)
    with pytest.raises(RowError) as by_length:
        chosen.length(row)
    with pytest.raises(RowError) as by_sample:
        chosen.encode(row, 0)
    assert str(by_length.value) == str(by_sample.value) and str(by_length.value).startswith(f"{folder}/d.jsonl:4: ")
    return by_length.value.reason


def reference(raw: dict[str, Any], folder: Path) -> Any:
    """What the processor makes of the same conversation; it is given whole videos and samples their frames itself."""
    row = parse_row(raw, folder / "d.jsonl", 1)
    messages, metadata = [], []
    for message in row.messages:
        content: Any = []
        for part in message.parts:
            if isinstance(part, VideoPart):
                frames, rate = all_frames(folder / str(part.source))
                content.append({"type": "video", "video": frames})
                metadata.append({"total_num_frames": len(frames), "fps": rate})
            elif isinstance(part, ImagePart):
                content.append({"type": "image", "image": str(folder / str(part.source))})
            else:
                content.append({"type": "text", "text": part.text})
        messages.append({"role": message.role, "content": content})
    options = {"processor_kwargs": {"videos_kwargs": {"video_metadata": metadata}}} if metadata else {}
    return processor().apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt", **options)


def all_frames(path: Path) -> tuple[np.ndarray, float]:
    with av.open(str(path)) as container:
        rate = float(container.streams.video[0].average_rate or 0)
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]), rate


def trained_text(sample: Sample) -> str:
    return processor().tokenizer.decode(sample.labels_L[sample.labels_L != IGNORED_LABEL])


@pytest.mark.parametrize("name", ROWS)
def test_equals_the_processor(name: str, media: Path) -> None:
    sample, expected = encode(ROWS[name], media), reference(ROWS[name], media)
    assert torch.equal(sample.input_ids_L, expected["input_ids"][0])
    grids = [expected[key] for key in ("image_grid_thw", "video_grid_thw") if key in expected]
    patches = [expected[key] for key in ("pixel_values", "pixel_values_videos") if key in expected]
    assert (sample.visual is None) == (not grids)
    if sample.visual is not None:
        assert torch.equal(sample.visual.grid_thw, torch.cat(grids))
        assert torch.equal(sample.visual.patches_PD, torch.cat(patches))


@pytest.mark.parametrize("name", ROWS)
def test_length_is_that_of_the_sample(name: str, media: Path) -> None:
    row = parse_row(ROWS[name], media / "d.jsonl", 1)
    assert encoder().length(row) == len(encoder().encode(row, 0))


@pytest.mark.parametrize("name", ROWS)
def test_without_patches_the_sample_is_the_same(name: str, media: Path) -> None:
    row = parse_row(ROWS[name], media / "d.jsonl", 1)
    whole, bare = encoder().encode(row, 0), encoder(decode_media=False).encode(row, 0)
    for part in ("input_ids_L", "labels_L", "weights_L", "position_ids_3L"):
        assert torch.equal(getattr(bare, part), getattr(whole, part))
    assert (bare.visual is None) == (whole.visual is None)
    if bare.visual is not None and whole.visual is not None:
        assert torch.equal(bare.visual.grid_thw, whole.visual.grid_thw) and torch.equal(bare.visual.positions_V, whole.visual.positions_V)
        assert bare.visual.patches_PD.numel() == 0


@pytest.mark.parametrize("name", ROWS)
def test_shapes_and_places(name: str, media: Path) -> None:
    sample = encode(ROWS[name], media)
    length = len(sample)
    assert sample.row == 5
    assert sample.labels_L.shape == sample.weights_L.shape == (length,) and sample.position_ids_3L.shape == (3, length)
    assert sample.labels_L.dtype == torch.int64 and sample.weights_L.dtype == torch.float32
    labelled = sample.labels_L != IGNORED_LABEL
    assert torch.equal(sample.labels_L[labelled], sample.input_ids_L[labelled])
    assert torch.equal(sample.weights_L, labelled.float())
    if sample.visual is not None:
        kinds = sample.input_ids_L[sample.visual.positions_V]
        num_images = int((sample.input_ids_L == processor().image_token_id).sum())
        assert (kinds[:num_images] == processor().image_token_id).all() and (kinds[num_images:] == processor().video_token_id).all()
        assert len(kinds) == sample.visual.grid_thw.prod(1).sum() // 4 and sample.visual.patches_PD.dtype == torch.float32


def test_labels_are_the_answers_and_their_ends(media: Path) -> None:
    assert trained_text(encode(ROWS["image_in_each_turn"], media)) == "b<|im_end|>d<|im_end|>"
    assert trained_text(encode(ROWS["text"], media)) == "3 naïve 🙂<|im_end|>"


def test_a_token_across_the_border_is_not_trained() -> None:
    """Characters 2 to 6 are trained; the token 1-3 holds one that is not, and the last token is empty."""
    weights_C = np.array([-1, -1, 0.5, 0.5, 2, 2, 0, -1], dtype=np.float32)
    offsets = np.array([(0, 1), (1, 3), (3, 4), (4, 6), (6, 7), (7, 8), (5, 5)])
    labels, weights = _label(torch.arange(10, 17), offsets, weights_C)
    assert labels.tolist() == [IGNORED_LABEL, IGNORED_LABEL, 12, 13, 14, IGNORED_LABEL, IGNORED_LABEL]
    assert weights.tolist() == [0, 0, 0.5, 2, 0, 0, 0]


def test_weights_follow_the_messages(media: Path) -> None:
    raw = chat("u", "first")
    raw["messages"] += chat("v", "second")["messages"]
    raw["messages"][1]["weight"] = 0.25
    sample = encode(raw, media)
    labelled = sample.labels_L != IGNORED_LABEL
    assert set(sample.weights_L[~labelled].tolist()) == {0.0}
    first, second = sample.weights_L[labelled].split([int((sample.weights_L == 0.25).sum()), int((sample.weights_L == 1.0).sum())])
    assert first.unique().tolist() == [0.25] and second.unique().tolist() == [1.0]
    raw["messages"][1]["loss"] = False
    assert trained_text(encode(raw, media)) == "second<|im_end|>"


def test_row_without_a_label(media: Path) -> None:
    raw = chat("u", "a")
    raw["messages"][1]["loss"] = False
    sample = encode(raw, media)
    assert (sample.labels_L == IGNORED_LABEL).all() and (sample.weights_L == 0).all()


@pytest.mark.parametrize("name", ["image", "video"])
def test_media_in_an_answer_are_not_trained(name: str, media: Path) -> None:
    kind = {"image": {"images": ["wide.png"]}, "video": {"videos": ["9.mp4"]}}[name]
    sample = encode(chat("draw", f"here: <{name}>done", **kind), media)
    assert trained_text(sample) == "here: done<|im_end|>"


def test_pt_trains_text_alone(media: Path) -> None:
    raw = {"text": "once <image>upon<video> a time", "images": ["wide.png"], "videos": ["9.mp4"]}
    sample = encode(raw, media, mode="pt")
    assert trained_text(sample) == "once upon a time<|endoftext|>"
    assert encoder(mode="pt").length(parse_row(raw, media / "d.jsonl", 1)) == len(sample)
    assert (sample.input_ids_L == processor().tokenizer.convert_tokens_to_ids("<|endoftext|>")).sum() == 1
    assert sample.visual is not None and len(sample.visual.grid_thw) == 2


def test_positions_are_those_of_the_family(media: Path) -> None:
    from swiftcp.models.qwen3_vl.positions import qwen3_vl_position_ids

    sample, expected = encode(ROWS["image_and_video"], media), reference(ROWS["image_and_video"], media)
    tokens = processor()
    positions = qwen3_vl_position_ids(
        expected["input_ids"][0],
        expected["image_grid_thw"],
        expected["video_grid_thw"],
        image_token_id=tokens.image_token_id,
        video_token_id=tokens.video_token_id,
        spatial_merge_size=2,
    )
    assert torch.equal(sample.position_ids_3L, positions)


def test_case_11_one_frame_is_doubled(media: Path) -> None:
    sample = encode(chat("<video>", videos=["1.mp4"]), media)
    assert sample.visual is not None and sample.visual.grid_thw[0, 0] == 1
    text = processor().tokenizer.decode(sample.input_ids_L)
    assert "<0.0 seconds>" in text


def test_case_11_short_clips_are_clamped(media: Path) -> None:
    for num_frames, pairs in ((2, 1), (9, 2)):
        sample = encode(chat("<video>", videos=[f"{num_frames}.mp4"]), media)
        assert sample.visual is not None and sample.visual.grid_thw[0, 0] == pairs
        capped = encode(chat("<video>", videos=[f"{num_frames}.mp4"]), media, limits=MediaLimits(fps=1000.0, fps_min_frames=16))
        assert capped.visual is not None and capped.visual.grid_thw[0, 0] == -(-num_frames // 2)


def test_video_of_listed_frames(media: Path) -> None:
    part = {"type": "video", "video": ["wide.png"] * 5, "fps": 2}
    row = parse_row(chat([part, {"type": "text", "text": "?"}]), media / "d.jsonl", 1)
    sample = encoder().encode(row, 0)
    assert encoder().length(row) == len(sample)
    frames = [np.asarray(picture(200, 100))] * 5
    metadata = {"total_num_frames": 5, "fps": 2.0, "frames_indices": list(range(5))}
    expected = processor()(
        text=[processor().apply_chat_template([{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "?"}]}])],
        videos=[np.stack(frames)],
        video_metadata=[metadata],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert torch.equal(sample.input_ids_L[: expected["input_ids"].shape[1]], expected["input_ids"][0])
    assert sample.visual is not None and torch.equal(sample.visual.patches_PD, expected["pixel_values_videos"])


def test_turned_video(media: Path) -> None:
    turn_video(media / "portrait.mp4", media / "turned.mp4", 90)
    row = parse_row(chat("<video>", videos=["turned.mp4"]), media / "d.jsonl", 1)
    sample, lying = encoder().encode(row, 0), encode(chat("<video>", videos=["portrait.mp4"]), media)
    assert encoder().length(row) == len(sample) and sample.visual is not None and lying.visual is not None
    frames, height, width = lying.visual.grid_thw[0].tolist()
    assert sample.visual.grid_thw[0].tolist() == [frames, width, height] and height != width


def test_sampling_rate_of_one_video(media: Path) -> None:
    def num_pairs(fps: float) -> int:
        sample = encode(chat([{"type": "video", "video": "20.mp4", "fps": fps}]), media)
        assert sample.visual is not None
        return int(sample.visual.grid_thw[0, 0])

    assert (num_pairs(4), num_pairs(8)) == (5, 10)


def test_frames_of_different_sizes(media: Path) -> None:
    part = {"type": "video", "video": ["wide.png", "tall.png"], "fps": 2}
    with pytest.raises(RowError, match=r"d.jsonl:1: video of 2 frames from wide.png on has frames of different sizes"):
        encode(chat([part]), media)


def test_case_04_extreme_ratios(media: Path) -> None:
    for height in (4000, 4100):
        picture(20, height).save(media / f"{height}.png")
    assert len(encode(chat("<image>", images=["4000.png"]), media)) > 100
    reason = refused(chat("<image>", images=["4100.png"]), media)
    assert "image 4100.png of 20x4100 pixels is refused" in reason and "200" in reason


def test_case_05_a_flat_image_keeps_its_sides(media: Path) -> None:
    picture(3200, 20).save(media / "flat.png")
    limits = MediaLimits(image_min_token_num=1, image_max_token_num=4)
    sample = encode(chat("<image>", images=["flat.png"]), media, limits=limits)
    assert sample.visual is not None and sample.visual.grid_thw.min() >= 1


@pytest.mark.parametrize("tokens", [8, 40])
def test_image_limits(tokens: int, media: Path) -> None:
    def num_tokens(name: str, limits: MediaLimits) -> int:
        row = parse_row(chat("<image>", images=[name]), media / "d.jsonl", 1)
        sample = encoder(limits=limits).encode(row, 0)
        assert encoder(limits=limits).length(row) == len(sample)
        return int((sample.input_ids_L == processor().image_token_id).sum())

    assert num_tokens("large.png", MediaLimits(image_max_token_num=tokens)) <= tokens
    assert num_tokens("tiny.png", MediaLimits(image_min_token_num=tokens)) >= tokens


def test_video_limits(media: Path) -> None:
    write_video(media / "large.mp4", num_frames=20, size=(320, 240), fps=8)

    def grid(limits: MediaLimits) -> list[int]:
        row = parse_row(chat("<video>", videos=["large.mp4"]), media / "d.jsonl", 1)
        sample = encoder(limits=limits).encode(row, 0)
        assert encoder(limits=limits).length(row) == len(sample) and sample.visual is not None
        return sample.visual.grid_thw[0].tolist()

    assert grid(MediaLimits(fps=8)) == [10, 12, 16]
    frames, height, width = grid(MediaLimits(fps=4, video_max_token_num=16))
    assert frames == 5 and height * width <= 4 * 16
    assert grid(MediaLimits(fps=8, fps_max_frames=6))[0] == 3


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (MediaLimits(image_max_token_num=2), "image_min_token_num 4 exceeds image_max_token_num 2"),
        (MediaLimits(video_max_token_num=4), "video_max_token_num 4 is less than 1.05 x video_min_token_num = 4.2"),
        (MediaLimits(fps_min_frames=99), "fps_min_frames 99 exceeds fps_max_frames 64"),
        (MediaLimits(fps=-1.0), "fps -1.0: it must be above 0"),
    ],
)
def test_limits_that_contradict(limits: MediaLimits, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        encoder(limits=limits)
    assert words in str(caught.value)


def test_limits_leave_the_processor_alone() -> None:
    encoder(limits=MediaLimits(image_max_token_num=9, video_max_token_num=30, fps=9.0))
    assert processor().image_processor.size["longest_edge"] == 512 * 512
    assert processor().video_processor.fps == 2 and not processor().video_processor.cap_pixels_per_frame


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (chat("u<|image_pad|>", "a"), "message 1 holds the special token <|image_pad|>"),
        (chat("<image>", images=["missing.png"]), "missing.png is no file"),
        (chat("<video>", videos=["wide.mp4"]), "wide.mp4 is no file"),
        (chat("<video>", videos=["wide.txt"]), "video wide.txt cannot be read"),
        ({"messages": [{"role": "user", "content": "u"}]}, "ends with the role user"),
    ],
)
def test_errors_name_the_row(raw: dict[str, Any], words: str, media: Path) -> None:
    (media / "wide.txt").write_text("no video")
    assert words in refused(raw, media)


def test_case_02_pixels_are_checked_on_demand(media: Path) -> None:
    contents = (media / "large.png").read_bytes()
    (media / "cut.png").write_bytes(contents[: len(contents) // 2])
    row = parse_row(chat("<image><image>", images=["wide.png", "cut.png"]), media / "d.jsonl", 3)
    assert encoder().length(row) > 0
    with pytest.raises(RowError, match=r"d.jsonl:3: image cut.png cannot be read"):
        encoder().check_media(row)
    frames = {"type": "video", "video": ["wide.png", "cut.png"], "fps": 1}
    with pytest.raises(RowError, match=r"d.jsonl:3: image cut.png cannot be read"):
        encoder().check_media(parse_row(chat([frames]), media / "d.jsonl", 3))
    encoder().check_media(parse_row(ROWS["image_and_video"], media / "d.jsonl", 3))


def test_case_41_no_stale_lengths(tmp_path: Path) -> None:
    """A picture that changes at the same path changes the sample, also for an encoder that has seen it."""
    picture(200, 100).save(tmp_path / "wide.png")
    row, chosen = parse_row(ROWS["image"], tmp_path / "d.jsonl", 1), encoder()
    before = chosen.length(row)
    picture(400, 300).save(tmp_path / "wide.png")
    assert chosen.length(row) == len(chosen.encode(row, 0)) != before


def test_template_that_drops_media(media: Path) -> None:
    changed = copy.copy(processor())
    changed.chat_template = processor().chat_template.replace("vision('image', seen.images)", "''")
    with pytest.raises(RowError, match=r"writes 0 of the row's 1 images"):
        RowEncoder(changed, lambda ids, images, videos: ids).length(parse_row(ROWS["image"], media / "d.jsonl", 1))


def test_unforeseen_errors_name_the_row_too(media: Path) -> None:
    def fail(*_: Any) -> Tensor:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        RowEncoder(processor(), fail).encode(parse_row(ROWS["text"], media / "d.jsonl", 3), 0)
    assert pickle.loads(pickle.dumps(caught.value)).__notes__ == [f"while reading {media}/d.jsonl:3"]


def test_encoder_can_be_sent(media: Path) -> None:
    again = pickle.loads(pickle.dumps(encoder(mode="pt", max_length=9)))
    row = parse_row(ROWS["image_and_video"], media / "d.jsonl", 1)
    assert (again.mode, again.max_length, again.pad_token_id) == ("pt", 9, processor().tokenizer.pad_token_id)
    assert _equal(again.encode(row, 0), encoder(mode="pt").encode(row, 0))


def _equal(one: Sample, two: Sample) -> bool:
    assert one.visual is not None and two.visual is not None
    pairs: list[tuple[Tensor, Tensor]] = [
        (one.input_ids_L, two.input_ids_L),
        (one.labels_L, two.labels_L),
        (one.visual.patches_PD, two.visual.patches_PD),
    ]
    return all(torch.equal(a, b) for a, b in pairs)


def test_sft_needs_a_chat_template_and_pt_does_not() -> None:
    bare = copy.deepcopy(processor())
    bare.chat_template = bare.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="no chat template"):
        RowEncoder(bare, lambda ids, images, videos: ids)
    assert RowEncoder(bare, lambda ids, images, videos: ids, mode="pt").mode == "pt"
