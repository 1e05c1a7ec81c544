"""What stands in the text for each medium, as the checkpoint's processor writes it.

Two kinds of processors are known: those with a method a modality (Qwen3-VL), and Qwen3-Omni's, which rewrites whole texts and is
asked for one medium at a time here, so that the caller knows where in the text each of them lies.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    Qwen3OmniMoeProcessor,
    Qwen3OmniMoeProcessorKwargs,
    _get_feat_extract_output_lengths,
)

from swiftcp.data.visuals import MediaPlan


class Replacements(NamedTuple):
    """Placeholders and whatever belongs to them, for each medium in the order of the row's."""

    images: list[str]
    videos: list[str]
    audios: list[str]


def replacements(processor: Any, plan: MediaPlan, *, use_audio_in_video: bool) -> Replacements:
    """What the processor puts into the place of each medium's token."""
    if isinstance(processor, Qwen3OmniMoeProcessor):
        return _OmniText(processor).replacements(plan, use_audio_in_video)
    images = {"image_grid_thw": plan.image_grid_thw}
    videos = {"video_grid_thw": plan.video_grid_thw, "video_metadata": plan.video_metadata}
    return Replacements(
        [processor.replace_image_token(images, image_idx=i) for i in range(len(plan.image_grid_thw))],
        [processor.replace_video_token(videos, video_idx=i) for i in range(len(plan.video_grid_thw))],
        [],
    )


class _OmniText:
    """One medium's text by Qwen3-Omni's processor."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        kinds: Any = Qwen3OmniMoeProcessorKwargs
        defaults = kinds._defaults
        self._video_defaults, self._window = defaults["videos_kwargs"], defaults["audio_kwargs"]["n_window"]

    def replacements(self, plan: MediaPlan, use_audio_in_video: bool) -> Replacements:
        processor = self._processor
        lengths = iter(_get_feat_extract_output_lengths(plan.num_frames_A, self._window).tolist())
        images = [self._written(processor.image_token, images=[grid]) for grid in plan.image_grid_thw]
        videos, audios = [], []
        grids = iter(zip(plan.video_grid_thw, plan.seconds_per_grid_W.tolist(), strict=True))
        for kind in plan.kinds:
            if kind == "audio":
                audios.append(self._written(processor.audio_token, audios=[next(lengths)]))
            elif kind == "video":
                grid, seconds = next(grids)
                videos.append(self._heard(grid, seconds, next(lengths)) if use_audio_in_video else self._video(grid))
        return Replacements(images, videos, audios)

    def _video(self, grid: Any) -> str:
        return self._written(self._processor.video_token, videos=[grid])

    def _heard(self, grid: Any, seconds: float, num_sounds: int) -> str:
        """A video and its sound, in the order of time. The processor writes the vision markers anew, which the template has written."""
        begin, end = self._processor.vision_bos_token, self._processor.vision_eos_token
        text = begin + self._processor.video_token + end
        return self._written(text, videos=[grid], seconds=[seconds], audios=[num_sounds], heard=True).removeprefix(begin).removesuffix(end)

    def _written(self, text: str, *, images: Any = (), videos: Any = (), seconds: Any = (), audios: Any = (), heard: bool = False) -> str:
        (written,) = self._processor.replace_multimodal_special_tokens(
            [text],
            iter(audios),
            iter(images),
            iter(videos),
            video_second_per_grid=iter(seconds),
            use_audio_in_video=heard,
            position_id_per_seconds=self._video_defaults["position_id_per_seconds"],
            seconds_per_chunk=self._video_defaults["seconds_per_chunk"],
        )
        return written
