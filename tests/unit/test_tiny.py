"""A tiny checkpoint is whole, loads in transformers, and is the same each time."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from swiftcp.errors import ConfigError
from swiftcp.models.tiny import MARKER_TOKENS, SPECIAL_TOKENS, write_tiny

PROMPT = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What digit is this?<|im_end|>\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_tiny("qwen3_vl", path)
    return path


@pytest.fixture(scope="module")
def processor(folder: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import Qwen3VLForConditionalGeneration

    return Qwen3VLForConditionalGeneration.from_pretrained(folder).eval()


def _hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def _ask(processor: Any, image: Image.Image) -> dict[str, torch.Tensor]:
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What digit is this?"}]
    return processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )


def test_two_writes_are_equal(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    write_tiny("qwen3_vl", tmp_path)
    assert _hashes(tmp_path) == _hashes(folder)


def test_another_process_writes_the_same(folder: Path, tmp_path: Path) -> None:
    code = f"from pathlib import Path; from swiftcp.models.tiny import write_tiny; write_tiny('qwen3_vl', Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert _hashes(tmp_path) == _hashes(folder)


def test_another_seed_differs_in_the_weights_alone(folder: Path, tmp_path: Path) -> None:
    write_tiny("qwen3_vl", tmp_path, seed=1)
    ours, theirs = _hashes(folder), _hashes(tmp_path)
    assert {name for name in ours if ours[name] != theirs[name]} == {"model.safetensors"}


def test_writing_leaves_the_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    write_tiny("qwen3_vl", tmp_path)
    assert torch.equal(torch.get_rng_state(), before)


def test_tied_embeddings_store_one_tensor(tmp_path: Path) -> None:
    from safetensors import safe_open
    from transformers import Qwen3VLForConditionalGeneration

    write_tiny("qwen3_vl", tmp_path, tie_word_embeddings=True)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118  (safe_open is no mapping)
    tied = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path)
    assert tied.lm_head.weight is tied.model.language_model.embed_tokens.weight


def test_shape_has_what_the_family_has(model: Any) -> None:
    text, vision = model.config.text_config, model.config.vision_config
    assert text.num_key_value_heads < text.num_attention_heads
    assert text.rope_parameters["mrope_interleaved"] and 2 * sum(text.rope_parameters["mrope_section"]) == text.head_dim
    assert len(vision.deepstack_visual_indexes) == 2
    assert any("q_norm" in name for name, _ in model.named_parameters())


def test_special_tokens_are_one_token_each(processor: Any, model: Any) -> None:
    tokenizer, config = processor.tokenizer, model.config
    for token in SPECIAL_TOKENS + MARKER_TOKENS:
        assert tokenizer.convert_ids_to_tokens(tokenizer(token)["input_ids"]) == [token]
    assert len(tokenizer) < config.text_config.vocab_size
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.convert_tokens_to_ids("<|image_pad|>") == config.image_token_id
    assert tokenizer.convert_tokens_to_ids("<|video_pad|>") == config.video_token_id


@pytest.mark.parametrize("text", ["What digit is this? 1234", "naïve 日本語 🙂", "  two  spaces\n\n\tand tabs", "<think>a</think>"])
def test_tokenizer_loses_nothing(processor: Any, text: str) -> None:
    assert processor.tokenizer.decode(processor.tokenizer(text)["input_ids"]) == text


def test_template_of_one_image(processor: Any) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "What digit is this?"}]
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "7"}]
    assert processor.apply_chat_template(messages) == PROMPT + "<|im_start|>assistant\n7<|im_end|>\n"
    assert processor.apply_chat_template(messages[:1], add_generation_prompt=True) == PROMPT + "<|im_start|>assistant\n"


def test_template_of_tools(processor: Any) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    as_dict, as_text = (
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "1 + 2?"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]},
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "4"},
        ]
        for arguments in ({"a": 1}, '{"a": 1}')
    )
    text = processor.apply_chat_template(as_dict, tools=[tool])
    assert text == processor.apply_chat_template(as_text, tools=[tool])
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools") and text.count("<|im_start|>system") == 1
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n' in text
    assert text.endswith("<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n")


def test_generates_and_sees_the_image(processor: Any, model: Any) -> None:
    black, white = (_ask(processor, Image.new("RGB", (8, 8), colour)) for colour in ("black", "white"))
    assert int(black["image_grid_thw"].prod()) == 16
    assert model.generate(**black, max_new_tokens=4).shape[1] > black["input_ids"].shape[1]
    with torch.no_grad():
        moved = (model(**black).logits[0, -1] - model(**white).logits[0, -1]).abs().max()
    assert moved > 0.1


def test_video_is_read(processor: Any, model: Any) -> None:
    frames = torch.zeros(4, 3, 64, 64, dtype=torch.uint8)
    inputs = processor(text=["<|vision_start|><|video_pad|><|vision_end|>"], videos=[frames], do_sample_frames=False, return_tensors="pt")
    assert inputs["video_grid_thw"].tolist() == [[2, 4, 4]]
    with torch.no_grad():
        assert torch.isfinite(model(**inputs).logits).all()


def test_unknown_family_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown family 'llama'.*qwen3_vl"):
        write_tiny("llama", tmp_path)


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        write_tiny("qwen3_vl", path)


def test_import_is_light() -> None:
    code = "import sys, swiftcp.models.tiny; assert not {'torch', 'transformers', 'megatron'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_another_model_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"vocab_size": 151936}}')
    with pytest.raises(ConfigError, match="holds a model that is not a tiny one"):
        write_tiny("qwen3_vl", tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]


def test_omni_is_whole_and_the_same_each_time(tmp_path: Path) -> None:
    """The thinker, talker and code2wav load with nothing missing; `transformers` can take the thinker alone."""
    from transformers import AutoProcessor, Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeThinkerForConditionalGeneration

    for folder in (tmp_path / "a", tmp_path / "b"):
        write_tiny("qwen3_omni_moe", folder)
    assert _hashes(tmp_path / "a") == _hashes(tmp_path / "b")
    write_tiny("qwen3_omni_moe", tmp_path / "b", seed=1)  # replaces a tiny model, and no other
    for kind in (Qwen3OmniMoeForConditionalGeneration, Qwen3OmniMoeThinkerForConditionalGeneration):
        _, found = kind.from_pretrained(tmp_path / "a", output_loading_info=True)
        assert not found["missing_keys"] and not found["mismatched_keys"]
    processor = AutoProcessor.from_pretrained(tmp_path / "a")
    names = [processor.image_token, processor.video_token, processor.audio_token, processor.audio_bos_token, processor.vision_eos_token]
    assert len(set(processor.tokenizer.convert_tokens_to_ids(names))) == 5
    assert processor.tokenizer.unk_token_id not in processor.tokenizer.convert_tokens_to_ids(names)
