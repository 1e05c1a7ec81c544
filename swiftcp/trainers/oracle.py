"""`transformers` itself, one row at a time: what every family's log-probabilities are held against."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from swiftcp.data.batch import Sample
from swiftcp.models.family import Family


def load_oracle(folder: Path, family: Family, *, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The checkpoint as `transformers` builds it, in evaluation mode, on PyTorch's attention. Parts that are not trained stay behind."""
    import transformers
    from transformers.utils import logging

    model_class, verbosity = getattr(transformers, family.architecture), logging.get_verbosity()
    logging.set_verbosity_error()  # it would list what stays behind, tensor by tensor
    try:
        model, found = model_class.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True)
    finally:
        logging.set_verbosity(verbosity)
    assert not found["missing_keys"], found["missing_keys"]
    return model.to(device).eval()


def with_adapter(model: nn.Module, adapters: str | None) -> nn.Module:
    """The model with an adapter as PEFT adds it, in evaluation mode; as it is without one."""
    if adapters is None:
        return model
    from peft import PeftModel

    peft_model: Any = PeftModel.from_pretrained(model, adapters)  # type: ignore[arg-type]
    return peft_model.base_model.model.eval()


def _media_inputs(sample: Sample, config: Any, device: torch.device) -> dict[str, Tensor]:
    """Patches and grids by modality. A sample holds its images first, then its videos."""
    if sample.visual is None:
        return {}
    merged = config.vision_config.spatial_merge_size**2
    features = sample.visual.grid_thw.prod(-1) // merged
    num_image_features = int((sample.input_ids_L == config.image_token_id).sum())
    num_images = int((features.cumsum(0) <= num_image_features).sum()) if num_image_features else 0
    images, videos = sample.visual.grid_thw.split([num_images, len(features) - num_images])
    image_patches, video_patches = sample.visual.patches_PD.split([int(images.prod(-1).sum()), int(videos.prod(-1).sum())])
    inputs: dict[str, Tensor] = {}
    if len(images):
        inputs |= {"pixel_values": image_patches.to(device), "image_grid_thw": images.to(device)}
    if len(videos):
        inputs |= {"pixel_values_videos": video_patches.to(device), "video_grid_thw": videos.to(device)}
    return inputs


def _sound_inputs(sample: Sample, config: Any, device: torch.device) -> dict[str, Any]:
    """Features of sounds as the processor pads them, and how videos lie in time."""
    inputs: dict[str, Any] = {"attention_mask": torch.ones(1, len(sample), dtype=torch.int64, device=device)}
    if sample.seconds_per_grid_W is not None:
        starts = [config.vision_start_token_id, config.audio_start_token_id]
        heard = sample.input_ids_L.unfold(0, 2, 1).eq(torch.tensor(starts)).all(1).any()
        inputs |= {"video_second_per_grid": sample.seconds_per_grid_W.to(device), "use_audio_in_video": bool(heard)}
    if sample.audio is not None:
        frames = pad_sequence(sample.audio.features_FM.split(sample.audio.num_frames_A.tolist()), batch_first=True)
        mask = torch.arange(frames.size(1)) < sample.audio.num_frames_A[:, None]
        inputs |= {"input_features": frames.transpose(1, 2).to(device), "feature_attention_mask": mask.long().to(device)}
    return inputs


def oracle_logprobs(model: Any, sample: Sample) -> Tensor:
    """log p(token i + 1 | tokens 0 .. i) of one row alone, natural logarithm.

    Positions are left to `transformers`, so that ours are checked too.

    Returns:
        [L - 1] float32, with a gradient path where gradients are on.
    """
    config, device = model.config, model.device
    input_ids = sample.input_ids_L.to(device)[None]
    if hasattr(config, "audio_config"):
        more = _sound_inputs(sample, config, device)
    else:
        more = {"mm_token_type_ids": (input_ids == config.image_token_id).int() + 2 * (input_ids == config.video_token_id).int()}
    logits = model(input_ids=input_ids, use_cache=False, **more, **_media_inputs(sample, config, device)).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(-1, input_ids[0, 1:, None])[:, 0]
