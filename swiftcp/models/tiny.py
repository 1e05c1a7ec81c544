"""Tiny random checkpoints, for tests and for trying things out: complete Hugging Face folders, the same bytes each time.

Weights are scaled so that the outputs depend on every part of the input (tower, deepstack, positions, text) and the model still
trains well. They come from numpy's generator, tensor by tensor, so that no tensor depends on the order of the others.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swiftcp.errors import ConfigError
from swiftcp.models.tiny_omni import AUDIO_TOKENS, build_qwen3_omni_moe

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin
    from transformers.tokenization_utils_tokenizers import TokenizersBackend

ASSETS = Path(__file__).parent / "tiny_assets"
NUM_TEXT_TOKENS = 512
"""Entries of the byte-level vocabulary; the special tokens come behind them."""
VOCAB_SIZE = 640
"""Rows of the embedding: more than the tokenizer has tokens, as in the published models."""
MAX_POSITIONS = 4096
"""Longest sequence in tokens: it is the default of `max_length`, so a run without it must fit a laptop."""

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
MARKER_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""One token each, but part of the text: `skip_special_tokens` keeps them."""


def write_tiny(family: str, folder: Path, seed: int = 0, *, tie_word_embeddings: bool = False, num_layers: int = 4) -> None:
    """Write a tiny checkpoint of `family` into `folder`: config, weights (float32), tokenizer, chat template, processors.

    Raises:
        ConfigError: the family is unknown, or `folder` is a file or holds another model.
    """
    if family not in _BUILDERS:
        raise ConfigError(f"tiny: unknown family '{family}': use one of {', '.join(sorted(_BUILDERS))}")
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"tiny: {folder} is a file: name a folder")
    if _holds_another_model(folder):
        raise ConfigError(f"tiny: {folder} holds a model that is not a tiny one, which would be replaced: name another folder")
    tokenizer = _train_tokenizer(_OWN_TOKENS.get(family, ()))
    model, processor = _BUILDERS[family](tokenizer, tie_word_embeddings, num_layers)
    _randomize(model, seed)
    model.generation_config = _generation_config(tokenizer)
    with _no_progress_bars():
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


def _holds_another_model(folder: Path) -> bool:
    """Whether there are weights, or a configuration, that this module did not write."""
    config = folder / "config.json"
    if not config.is_file():
        return any(folder.glob("*.safetensors"))
    try:
        described = json.loads(config.read_text(encoding="utf-8"))
        return described.get("thinker_config", described)["text_config"]["vocab_size"] != VOCAB_SIZE
    except (ValueError, KeyError, TypeError, AttributeError):
        return True


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _train_tokenizer(own_tokens: Sequence[str]) -> TokenizersBackend:
    """Byte-level BPE over the corpus in this package, with the special tokens of the published tokenizers, `own_tokens` last."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_TEXT_TOKENS, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    bpe.train_from_iterator((ASSETS / "corpus.txt").read_text(encoding="utf-8").splitlines(keepends=True), trainer)
    trained = json.loads(bpe.to_str())["model"]
    merges: Any = [tuple(merge) for merge in trained["merges"]]  # its annotation says strings; BPE takes pairs
    tokenizer = Qwen2Tokenizer(vocab=trained["vocab"], merges=merges, model_max_length=MAX_POSITIONS)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS], special_tokens=True)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKER_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in own_tokens], special_tokens=True)
    tokenizer.eos_token = "<|im_end|>"  # only now: the constructor would put it before <|endoftext|>
    tokenizer.chat_template = (ASSETS / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def _generation_config(tokenizer: TokenizersBackend) -> Any:
    """Greedy; a turn ends with <|im_end|>, a text with <|endoftext|>."""
    from transformers import GenerationConfig

    turn_end, text_end = (tokenizer.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>"))
    return GenerationConfig(do_sample=False, eos_token_id=[turn_end, text_end], pad_token_id=text_end, bos_token_id=text_end)


def _randomize(model: PreTrainedModel, seed: int) -> None:
    """Overwrite every parameter: weights keep the scale of what flows through them, gains and biases are off their rest values."""
    import torch

    zero_centered = model.config.model_type.startswith("qwen3_5")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(_random(name, tuple(parameter.shape), seed, zero_centered)))


def _random(name: str, shape: tuple[int, ...], seed: int, zero_centered: bool) -> np.ndarray:
    noise = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(shape, dtype=np.float32)
    mean, std = _distribution(name, shape, zero_centered)
    return mean + std * noise


def _distribution(name: str, shape: tuple[int, ...], zero_centered: bool) -> tuple[np.float32, np.float32]:
    """Mean and standard deviation of a parameter's entries.

    `zero_centered`: gains of the decoder stand for 1 more than they are, but for those behind a delta net.
    """
    if name.endswith("A_log"):
        return np.float32(-2.0), np.float32(0.5)  # so slow a decay that a row would see the one before it
    if len(shape) == 1:
        rests_at_zero = zero_centered and "visual." not in name and not name.endswith("linear_attn.norm.weight")
        return np.float32(name.endswith("weight") and not rests_at_zero), np.float32(0.1)
    fan_in = math.prod(shape[2:] if ".experts." in name else shape[1:])
    # A delta net's norm makes rounding large where what it norms is small.
    share = 0.5 if name.endswith("linear_attn.out_proj.weight") or (zero_centered and name == "lm_head.weight") else 1.0
    return np.float32(0.0), np.float32(share / math.sqrt(fan_in))


def _media_token_ids(tokenizer: TokenizersBackend) -> dict[str, Any]:
    return {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in {
            "image": "<|image_pad|>",
            "video": "<|video_pad|>",
            "vision_start": "<|vision_start|>",
            "vision_end": "<|vision_end|>",
        }.items()
    }


def _qwen3_vl_processor(tokenizer: TokenizersBackend) -> ProcessorMixin:
    """Patches as published (16 pixels, 2 frames, merged 2 x 2), but 4 to 256 tokens an image and at most 512 a video."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    patches: dict[str, Any] = dict(patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(size={"shortest_edge": 64 * 64, "longest_edge": 512 * 512}, **patches),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(
            size={"shortest_edge": 64 * 64, "longest_edge": 2 * 512 * 32 * 32},
            max_frames=64,
            cap_pixels_per_frame=False,
            **patches,
        ),
        chat_template=tokenizer.chat_template,
    )


def _build_qwen3_vl(tokenizer: TokenizersBackend, tie_word_embeddings: bool, num_layers: int) -> tuple[PreTrainedModel, ProcessorMixin]:
    """2 deepstack levels (so that 2 pipeline stages of 4 decoder layers can hold them), a tower of 3 blocks."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    config = Qwen3VLConfig(
        text_config=_text_config(tokenizer, tie_word_embeddings, num_layers),
        vision_config=_VISION,
        tie_word_embeddings=tie_word_embeddings,
        **_media_token_ids(tokenizer),
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen3VLForConditionalGeneration(config)
    return model, _qwen3_vl_processor(tokenizer)


def _text_config(tokenizer: TokenizersBackend, tie_word_embeddings: bool, num_layers: int) -> dict[str, Any]:
    return dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters=dict(rope_type="default", rope_theta=5_000_000, mrope_section=[3, 3, 2], mrope_interleaved=True),
        bos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        eos_token_id=tokenizer.convert_tokens_to_ids("<|im_end|>"),
        tie_word_embeddings=tie_word_embeddings,
    )


_VISION: dict[str, Any] = dict(
    depth=3,
    hidden_size=64,
    intermediate_size=128,
    num_heads=4,
    out_hidden_size=64,
    num_position_embeddings=64,
    deepstack_visual_indexes=[0, 1],
)


def _build_qwen3_vl_moe(tokenizer: TokenizersBackend, tie_word_embeddings: bool, num_layers: int) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Layers of 4 experts, 2 of them for each token; the second layer is dense."""
    import torch
    from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

    experts: dict[str, Any] = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1])
    config = Qwen3VLMoeConfig(
        text_config=_text_config(tokenizer, tie_word_embeddings, num_layers) | experts,
        vision_config=_VISION,
        tie_word_embeddings=tie_word_embeddings,
        **_media_token_ids(tokenizer),
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen3VLMoeForConditionalGeneration(config)
    return model, _qwen3_vl_processor(tokenizer)


def _qwen3_5_text_config(tokenizer: TokenizersBackend, tie_word_embeddings: bool, num_layers: int) -> dict[str, Any]:
    """Delta nets and attention by turns; a quarter of each head is rotated; more value heads than key heads, of another size."""
    text = _text_config(tokenizer, tie_word_embeddings, num_layers)
    rope = dict(rope_type="default", rope_theta=10_000_000, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)
    sizes = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=32, full_attention_interval=2)
    linear = dict(linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16, linear_value_head_dim=8)
    return text | sizes | linear | dict(rope_parameters=rope, rms_norm_eps=1e-2)  # as large as it must be for results to be compared


def _build_qwen3_5(tokenizer: TokenizersBackend, tie_word_embeddings: bool, num_layers: int) -> tuple[PreTrainedModel, ProcessorMixin]:
    import torch
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    config = Qwen3_5Config(
        text_config=_qwen3_5_text_config(tokenizer, tie_word_embeddings, num_layers),
        vision_config={key: value for key, value in _VISION.items() if key != "deepstack_visual_indexes"},
        tie_word_embeddings=tie_word_embeddings,
        **_media_token_ids(tokenizer),
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen3_5ForConditionalGeneration(config)
    return model, _qwen3_vl_processor(tokenizer)


def _build_qwen3_5_moe(tokenizer: TokenizersBackend, tie_word_embeddings: bool, num_layers: int) -> tuple[PreTrainedModel, ProcessorMixin]:
    """4 experts a layer, 2 of them for each token, beside the shared one."""
    import torch
    from transformers import Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration

    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, shared_expert_intermediate_size=32)
    text = _qwen3_5_text_config(tokenizer, tie_word_embeddings, num_layers) | experts
    del text["intermediate_size"]
    config = Qwen3_5MoeConfig(
        text_config=text,
        vision_config={key: value for key, value in _VISION.items() if key != "deepstack_visual_indexes"},
        tie_word_embeddings=tie_word_embeddings,
        **_media_token_ids(tokenizer),
    )
    with torch.random.fork_rng(devices=[]):
        model = Qwen3_5MoeForConditionalGeneration(config)
    return model, _qwen3_vl_processor(tokenizer)


def _build_qwen3_omni_moe(
    tokenizer: TokenizersBackend, tie_word_embeddings: bool, num_layers: int
) -> tuple[PreTrainedModel, ProcessorMixin]:
    return build_qwen3_omni_moe(tokenizer, _text_config(tokenizer, tie_word_embeddings, num_layers), _VISION)


_BUILDERS: dict[str, Callable[[TokenizersBackend, bool, int], tuple[PreTrainedModel, ProcessorMixin]]] = {
    "qwen3_vl": _build_qwen3_vl,
    "qwen3_omni_moe": _build_qwen3_omni_moe,
    "qwen3_vl_moe": _build_qwen3_vl_moe,
    "qwen3_5": _build_qwen3_5,
    "qwen3_5_moe": _build_qwen3_5_moe,
}
_OWN_TOKENS = {"qwen3_omni_moe": AUDIO_TOKENS}
