"""Sound from files to features: any rate and container, never cut, as many placeholders as the encoder gives features."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from swiftcp.data import audio_files
from swiftcp.data.audio_files import num_samples, read_audio
from swiftcp.data.batch import IGNORED_LABEL, Sample, collate_pack
from swiftcp.data.dataset import scan_rows
from swiftcp.data.media import MediaAccess, MediaError
from swiftcp.data.row_files import read_rows
from swiftcp.data.rows import MediaSource, RowError, parse_row

from .data_fixtures import (
    chat,
    encoder,
    omni_encoder,
    omni_tokens,
    picture,
    processor,
    write_heard_video,
    write_jsonl,
    write_sound,
    write_video,
)

ACCESS = MediaAccess()
RATE = 16_000


def sample_of(folder: Path, user: Any, **columns: Any) -> Sample:
    return omni_encoder().encode(parse_row(chat(user, **columns), folder / "rows.jsonl", 1), 0)


def refused(folder: Path, user: Any, **columns: Any) -> str:
    with pytest.raises(RowError) as caught:
        omni_encoder().length(parse_row(chat(user, **columns), folder / "rows.jsonl", 1))
    assert caught.value.kind == "media"
    return caught.value.reason


def num_placeholders(sample: Sample) -> int:
    return int((sample.input_ids_L == omni_tokens().audio).sum())


@pytest.fixture(params=["soundfile and soxr", "PyAV alone"])
def libraries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "PyAV alone":
        monkeypatch.setattr(audio_files, "_optional", lambda name: None)
    yield


@pytest.mark.parametrize("name", ["a.wav", "a.flac", "a.ogg", "a.mp3"])
def test_containers_rates_and_channels(tmp_path: Path, libraries: None, name: str) -> None:
    for rate, channels in ((16_000, 1), (44_100, 2), (8_000, 1)):
        path = write_sound(tmp_path / name, 1.25, rate, channels=channels)
        clip = read_audio(name, tmp_path, ACCESS, RATE)
        assert clip.dtype == np.float32
        assert clip.size == num_samples(str(path), tmp_path, ACCESS, RATE)
        times = np.arange(20_000) / RATE
        expected = 0.5 * np.sin(2 * np.pi * (300 + 40 * times) * times)
        if name in ("a.wav", "a.flac"):  # the others are lossy, and pad
            assert clip.size == 20_000
            assert np.abs(clip - expected)[400:-400].max() < 2e-3


def test_one_clip_named_four_ways(tmp_path: Path) -> None:
    contents = write_sound(tmp_path / "a b.wav", 0.5).read_bytes()
    encoded = base64.b64encode(contents).decode()
    sources: list[MediaSource] = ["a b.wav", f"file://{tmp_path}/a%20b.wav", f"data:audio/wav;base64,{encoded}", contents]
    for source in sources:
        assert np.array_equal(read_audio(source, tmp_path, ACCESS, RATE), read_audio("a b.wav", tmp_path, ACCESS, RATE))


def test_case_12_31_seconds_are_not_cut_at_any_rate(tmp_path: Path) -> None:
    for rate in (16_000, 44_100):
        write_sound(tmp_path / "long.wav", 31.0, rate)
        sample = sample_of(tmp_path, "<audio>What is it?", audios=["long.wav"])
        assert num_placeholders(sample) == 403
        assert sample.audio is not None and sample.audio.num_frames_A.tolist() == [3100]
        assert sample.audio.positions_E.numel() == 403


def test_case_13_the_number_of_placeholders_is_that_of_each_clip(tmp_path: Path) -> None:
    write_sound(tmp_path / "short.wav", 0.7)
    write_sound(tmp_path / "longer.wav", 2.4)
    sample = sample_of(tmp_path, "<audio>and<audio>?", audios=["short.wav", "longer.wav"])
    _, lengths = (sample.input_ids_L == omni_tokens().audio).unique_consecutive(return_counts=True)
    assert lengths[1::2].tolist() == [9, 31]


@pytest.mark.parametrize("seconds", [0.7, 1.0, 7.77, 30.5, 200.0])
def test_features_are_those_of_the_checkpoints_processor(tmp_path: Path, seconds: float) -> None:
    write_sound(tmp_path / "a.wav", seconds)
    write_sound(tmp_path / "b.wav", 0.633)
    clips = [read_audio(name, tmp_path, ACCESS, RATE) for name in ("b.wav", "a.wav")]
    sample = sample_of(tmp_path, "<audio><audio>?", audios=["b.wav", "a.wav"])
    whole = processor("qwen3_omni_moe")
    text = whole.apply_chat_template(
        chat([{"type": "audio"}, {"type": "audio"}, {"type": "text", "text": "?"}])["messages"], tokenize=False
    )
    expected = whole(text=text, audio=clips, return_tensors="pt")
    assert sample.input_ids_L.tolist() == expected["input_ids"][0].tolist()
    mask = expected["feature_attention_mask"].bool()
    assert sample.audio is not None
    assert torch.equal(sample.audio.features_FM, expected["input_features"].transpose(1, 2)[mask])
    assert sample.audio.num_frames_A.tolist() == mask.sum(1).tolist()


def test_sound_of_a_video_is_interleaved_as_the_processor_does(tmp_path: Path) -> None:
    write_heard_video(tmp_path / "v.mp4", num_frames=24, seconds=3.1)
    write_sound(tmp_path / "a.wav", 1.3)
    picture(64, 64).save(tmp_path / "p.png")
    row = parse_row(
        chat("<audio>Hear <video> and <image>", audios=["a.wav"], videos=["v.mp4"], images=["p.png"], use_audio_in_video=True),
        tmp_path / "rows.jsonl",
        1,
    )
    ours = omni_encoder()
    sample = ours.encode(row, 0)
    assert len(sample) == ours.length(row)
    whole, visual = processor("qwen3_omni_moe"), sample.visual
    parts = [{"type": "audio"}, {"type": "text", "text": "Hear "}, {"type": "video"}, {"type": "text", "text": " and "}, {"type": "image"}]
    text = whole.apply_chat_template(chat(parts)["messages"], tokenize=False)
    assert visual is not None and sample.audio is not None
    image, video = visual.grid_thw
    (expected,) = whole.replace_multimodal_special_tokens(
        [text],
        iter([17, int(sample.audio.positions_E.numel()) - 17]),
        iter([image]),
        iter([video]),
        video_second_per_grid=iter([1.0]),
        use_audio_in_video=True,
        position_id_per_seconds=13.0,
        seconds_per_chunk=2.0,
    )
    assert sample.input_ids_L.tolist() == whole.tokenizer(expected)["input_ids"]
    assert sample.position_ids_3L.dtype == torch.float32
    kinds = sample.input_ids_L[sample.input_ids_L > 500].unique_consecutive()
    assert (kinds == omni_tokens().audio).sum() > 3  # sound between frames
    assert (
        sample.labels_L[torch.isin(sample.input_ids_L, torch.tensor([omni_tokens().audio, omni_tokens().video]))] == IGNORED_LABEL
    ).all()


def test_case_14_a_missing_track_is_named_and_a_row_without_the_flag_needs_none(tmp_path: Path) -> None:
    write_video(tmp_path / "mute.mp4", num_frames=8)
    assert "mute.mp4 has no audio track" in refused(tmp_path, "<video>?", videos=["mute.mp4"], use_audio_in_video=True)
    frames = {"video": ["p.png", "p.png"], "fps": 2.0}
    picture(64, 64).save(tmp_path / "p.png")
    assert "2 listed frames has no audio track" in refused(tmp_path, "<video>?", videos=[frames], use_audio_in_video=True)
    assert sample_of(tmp_path, "<video>?", videos=["mute.mp4"]).audio is None


def test_case_14_without_strict_a_missing_track_is_counted(tmp_path: Path) -> None:
    write_video(tmp_path / "mute.mp4", num_frames=8)
    row = chat("<video>?", videos=["mute.mp4"])
    write_jsonl(tmp_path / "rows.jsonl", [row | {"use_audio_in_video": True}, row])
    scan = scan_rows(read_rows([str(tmp_path / "rows.jsonl")]), omni_encoder())
    assert [(bad.line, bad.kind) for bad in scan.bad_rows] == [(1, "media")]
    assert scan.kept == (1,)


def test_what_cannot_be_heard_is_named(tmp_path: Path) -> None:
    write_sound(tmp_path / "empty.wav", 0.0)
    write_sound(tmp_path / "click.wav", 0.02)
    (tmp_path / "text.wav").write_text("no sound")
    soundfile.write(tmp_path / "nan.wav", np.full(8000, np.nan, np.float32), RATE, subtype="FLOAT")
    assert "empty.wav has 0 samples" in refused(tmp_path, "<audio>?", audios=["empty.wav"])
    assert "click.wav has 320 samples of sound at 16000 Hz, of which at least 400" in refused(tmp_path, "<audio>?", audios=["click.wav"])
    assert "audio text.wav cannot be read" in refused(tmp_path, "<audio>?", audios=["text.wav"])
    assert "gone.wav is no file" in refused(tmp_path, "<audio>?", audios=["gone.wav"])
    with pytest.raises(MediaError, match="no numbers"):
        read_audio("nan.wav", tmp_path, ACCESS, RATE)
    picture(64, 64).save(tmp_path / "p.png")
    assert "p.png has no audio track" in refused(tmp_path, "<audio>?", audios=["p.png"])


def test_a_checkpoint_that_cannot_hear(tmp_path: Path) -> None:
    write_sound(tmp_path / "a.wav", 0.5)
    with pytest.raises(RowError, match="which the checkpoint cannot hear"):
        encoder().length(parse_row(chat("<audio>?", audios=["a.wav"]), tmp_path / "rows.jsonl", 1))


def test_packs_hold_sounds_in_stream_order(tmp_path: Path) -> None:
    write_sound(tmp_path / "a.wav", 0.7)
    write_sound(tmp_path / "b.wav", 2.4)
    samples = [sample_of(tmp_path, "<audio>?", audios=[name]) for name in ("a.wav", "b.wav")]
    batch = collate_pack([samples[0], sample_of(tmp_path, "x"), samples[1]], pack_align=8, pad_token_id=0)
    assert batch.audio is not None
    assert batch.audio.num_frames_A.tolist() == batch.audio.longest_A.tolist() == [70, 240]
    assert (batch.input_ids_BS.flatten()[batch.audio.positions_E] == omni_tokens().audio).all()
    assert batch.position_ids_3BS.dtype == torch.float32


def test_bytes_of_a_column_and_parts_in_the_content(tmp_path: Path) -> None:
    buffer = io.BytesIO(write_sound(tmp_path / "a.wav", 0.7).read_bytes())
    parts = [{"type": "audio", "audio": {"bytes": buffer.getvalue()}}, {"type": "text", "text": "<audio> is text here"}]
    assert num_placeholders(sample_of(tmp_path, parts)) == 9


def test_pretraining_on_text_and_sound(tmp_path: Path) -> None:
    write_sound(tmp_path / "a.wav", 0.7)
    row = parse_row({"text": "Before <audio> behind.", "audios": ["a.wav"]}, tmp_path / "rows.jsonl", 1)
    sample = omni_encoder(mode="pt").encode(row, 0)
    text = processor("qwen3_omni_moe").tokenizer.decode(sample.input_ids_L)
    assert text == "Before <|audio_start|>" + "<|audio_pad|>" * 9 + "<|audio_end|> behind.<|endoftext|>"
    media = torch.isin(
        sample.input_ids_L, torch.tensor(processor("qwen3_omni_moe").tokenizer.convert_tokens_to_ids(["<|audio_start|>", "<|audio_pad|>"]))
    )
    assert (sample.labels_L[media] == IGNORED_LABEL).all()
