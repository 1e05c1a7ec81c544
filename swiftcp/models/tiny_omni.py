"""The tiny Qwen3-Omni: thinker, talker and code2wav, though only the thinker is trained. See `swiftcp.models.tiny`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

AUDIO_TOKENS = ("<|audio_start|>", "<|audio_end|>", "<|audio_pad|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>")
"""Special tokens that this family has beside those of Qwen3-VL."""
_NAMED_TOKENS: dict[str, Any] = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""As the processor asks the tokenizer for them."""
NUM_MEL_BINS = 16


def build_qwen3_omni_moe(
    tokenizer: TokenizersBackend, text: dict[str, Any], vision: dict[str, Any]
) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Audio windows of 2 seconds in place of 8, and 2 of 4 experts a token.

    Args:
        text: sizes of the decoder, `vision` of the vision tower, as in the tiny Qwen3-VL.
    """
    import torch
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    tokenizer._set_model_specific_special_tokens(_NAMED_TOKENS)
    turns: dict[str, Any] = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in _TURN_TOKENS.items()}
    config = Qwen3OmniMoeConfig(
        thinker_config=_thinker_config(tokenizer, text, vision),
        talker_config=_talker_config(tokenizer, text),
        code2wav_config=_CODE2WAV,
        **turns,
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen3OmniMoeForConditionalGeneration(config)
    return model, _processor(tokenizer)


_TURN_TOKENS = {
    "im_start": "<|im_start|>",
    "im_end": "<|im_end|>",
    "tts_pad": "<tts_pad>",
    "tts_bos": "<tts_text_bos>",
    "tts_eos": "<tts_text_eod>",
    "system": "s",
    "user": "u",
    "assistant": "a",
}
"""The tiny vocabulary has no word for a role: its first letter stands for it."""

_CODE2WAV: dict[str, Any] = dict(
    codebook_size=16,
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=32,
    num_hidden_layers=1,
    num_quantizers=2,
    upsample_rates=[2, 2],
    upsampling_ratios=[2, 2],
    decoder_dim=16,
    sliding_window=8,
    max_position_embeddings=256,
)


def _media_ids(tokenizer: TokenizersBackend) -> dict[str, Any]:
    names = {"image": "image", "video": "video", "audio": "audio", "vision_start": "vision_bos", "audio_start": "audio_bos"}
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(_NAMED_TOKENS[f"{own}_token"]) for name, own in names.items()}


def _thinker_config(tokenizer: TokenizersBackend, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    audio = dict(
        num_mel_bins=NUM_MEL_BINS,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=64,
        d_model=32,
        output_dim=text["hidden_size"],
        n_window_infer=200,
        downsample_hidden_size=8,
    )
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48)
    return dict(
        text_config=text | experts,
        vision_config=vision,
        audio_config=audio,
        position_id_per_seconds=13,
        user_token_id=tokenizer.convert_tokens_to_ids("u"),
        vision_end_token_id=tokenizer.convert_tokens_to_ids("<|vision_end|>"),
        audio_end_token_id=tokenizer.convert_tokens_to_ids("<|audio_end|>"),
        **_media_ids(tokenizer),
    )


def _talker_config(tokenizer: TokenizersBackend, text: dict[str, Any]) -> dict[str, Any]:
    sizes = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256
    )
    return dict(
        text_config=dict(
            vocab_size=64,
            head_dim=16,
            num_experts=2,
            num_experts_per_tok=1,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            **sizes,
        ),
        code_predictor_config=dict(vocab_size=32, head_dim=16, num_code_groups=2, **sizes),
        num_code_groups=2,
        thinker_hidden_size=text["hidden_size"],
        accept_hidden_layer=1,
        spatial_merge_size=2,
        codec_eos_token_id=60,
        codec_nothink_id=61,
        codec_think_bos_id=62,
        codec_think_eos_id=63,
        codec_pad_id=58,
        codec_bos_id=59,
        speaker_id={"ethan": 57},
        position_id_per_seconds=13,
        **_media_ids(tokenizer),
    )


def _processor(tokenizer: TokenizersBackend) -> ProcessorMixin:
    """Patches and sound as published, but few mel bins."""
    from transformers import Qwen2VLImageProcessor, Qwen3OmniMoeProcessor, WhisperFeatureExtractor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    patches: dict[str, Any] = dict(patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return Qwen3OmniMoeProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 64 * 64, "longest_edge": 512 * 512}, **patches),
        video_processor=Qwen2VLVideoProcessor(
            size={"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
            max_frames=64,
            fps=2.0,
            cap_pixels_per_frame=False,
            **patches,
        ),
        feature_extractor=WhisperFeatureExtractor(feature_size=NUM_MEL_BINS),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
    )
