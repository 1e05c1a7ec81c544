"""LoRA's keys: defaults, what a folder in PEFT's format says, and the rules that name what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftcp.config import LogprobsConfig, resolve, validate
from swiftcp.config.tuner import AdapterFacts
from swiftcp.errors import ConfigError
from tests.unit.config_fixtures import ONE_CPU_RANK, arguments, valid


def write_adapter(folder: Path, **values: Any) -> Path:
    folder.mkdir()
    described = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, "lora_dropout": 0.1, "bias": "none", "rank_pattern": {}, **values}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    (folder / "adapter_model.safetensors").touch()
    return folder


def error_of(folder: Path, *more: str) -> str:
    with pytest.raises(ConfigError) as caught:
        valid(folder, *more)
    return str(caught.value)


def test_lora_has_a_learning_rate_of_its_own(tmp_path: Path) -> None:
    assert valid(tmp_path).config.lr == 1e-5
    config = valid(tmp_path, "--tuner_type", "lora").config
    assert (config.lr, config.vit_lr, config.target_modules) == (1e-4, 1e-4, ["all-linear"])
    assert valid(tmp_path, "--tuner_type", "lora", "--lr", "3e-5").config.lr == 3e-5


def test_scaling() -> None:
    assert AdapterFacts(4, 6, 0.0, False).scaling == 1.5
    assert AdapterFacts(4, 6, 0.0, True).scaling == 3.0


def test_an_adapter_says_rank_and_scaling(tmp_path: Path) -> None:
    adapter = str(write_adapter(tmp_path / "adapter", use_rslora=True))
    config = valid(tmp_path, "--tuner_type", "lora", "--adapters", adapter, "--lora_dropout", "0").config
    assert (config.lora_rank, config.lora_alpha, config.lora_dropout, config.use_rslora) == (4, 6, 0, True)
    assert "lora_rank 8 is not that of adapters" in error_of(tmp_path, "--tuner_type", "lora", "--adapters", adapter, "--lora_rank", "8")
    assert "target_modules: what is trained is what" in error_of(
        tmp_path, "--tuner_type", "lora", "--adapters", adapter, "--target_modules", "q_proj"
    )
    assert "adapters needs tuner_type lora" in error_of(tmp_path, "--adapters", adapter)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dora": True}, "use_dora True is not supported"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported"),
        ({"r": "many"}, "is no configuration of a LoRA adapter"),
    ],
)
def test_other_adapters_are_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    """By every command."""
    adapter = str(write_adapter(tmp_path / "adapter", **values))
    assert message in error_of(tmp_path, "--tuner_type", "lora", "--adapters", adapter)
    words = [word for word in arguments(tmp_path) if word not in ("--output_dir", str(tmp_path / "out"))]
    with pytest.raises(ConfigError, match=message.split()[0]):
        validate(resolve(LogprobsConfig, [*words, "--output", str(tmp_path / "o"), "--adapters", adapter], environment={}), ONE_CPU_RANK)


def test_a_folder_without_an_adapter(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    message = error_of(tmp_path, "--tuner_type", "lora", "--adapters", str(tmp_path / "empty"))
    assert "holds no adapter_config.json and no adapter_model.safetensors" in message
    assert "does not exist" in error_of(tmp_path, "--tuner_type", "lora", "--adapters", str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--target_regex (", "is no regular expression"),
        ("--target_regex .* --target_modules q_proj", "both say which layers get an adapter"),
        ("--target_modules all-linear q_proj", "all-linear stands alone"),
        ("--modules_to_save vit --freeze_vit true", "modules_to_save vit, but freeze_vit is true"),
    ],
)
def test_what_does_not_fit_together(more: str, message: str, tmp_path: Path) -> None:
    assert message in error_of(tmp_path, "--tuner_type", "lora", *more.split())


def test_keys_without_effect_warn(tmp_path: Path) -> None:
    assert any("lora_rank has no effect with tuner_type full" in warning for warning in valid(tmp_path, "--lora_rank", "4").warnings)
