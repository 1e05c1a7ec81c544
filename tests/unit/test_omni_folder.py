"""Qwen3-Omni's folders, the whole model and the thinker alone, come out as they went in; talker and code2wav are carried over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from swiftcp.checkpoint.hf_reader import load_hf_folder
from swiftcp.checkpoint.hf_writer import export_hf_folder
from swiftcp.errors import WeightsError
from swiftcp.models.registry import family_of

from .data_fixtures import checkpoint

EXPERT = "language_model.decoder.layers.{}.mlp.experts.local_experts.{}.linear_fc{}.weight"


class Model(torch.nn.Module):
    """The parameters of our model by name, without what computes."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        self._tensors = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}

    def state_dict(self, *arguments: Any, **keywords: Any) -> dict[str, Tensor]:  # type: ignore[override]
        return dict(self._tensors)


def model_for(folder: Path) -> tuple[Model, Any]:
    """Empty parameters of the shapes that the folder's configuration asks for, and the name table."""
    hf_config = AutoConfig.from_pretrained(folder)
    table = family_of(hf_config.model_type).name_table(hf_config)
    stored = {name: tensor for name, tensor in load_file(folder / "model.safetensors").items() if not table.is_carried(name)}
    parameters: dict[str, Tensor] = {}
    for rule in table._numbered_rules():
        if rule.sources[0] in stored:
            whole = [stored.pop(name) for name in rule.sources]
            parameters[rule.targets[0]] = torch.full_like(rule.join(whole, whole[0].shape), torch.nan)
    root = "" if hf_config.model_type.endswith("thinker") else "thinker."
    towers = {f"{root}visual.": "visual.", f"{root}audio_tower.": "audio."}
    for name, tensor in stored.items():
        (prefix,) = (prefix for prefix in towers if name.startswith(prefix))
        parameters[towers[prefix] + name.removeprefix(prefix)] = torch.full_like(tensor, torch.nan)
    return Model(parameters), table


@pytest.fixture(scope="module", params=["whole", "thinker"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A whole Qwen3-Omni, or its thinker as `transformers` saves it."""
    if request.param == "whole":
        yield checkpoint("qwen3_omni_moe")
        return
    from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

    path = tmp_path_factory.mktemp("thinker")
    Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(checkpoint("qwen3_omni_moe")).save_pretrained(path)
    yield path


def test_round_trip(folder: Path, tmp_path: Path) -> None:
    model, table = model_for(folder)
    load_hf_folder(model, folder, table)
    assert not any(parameter.isnan().any() for parameter in model.state_dict().values())
    export_hf_folder(model, folder, tmp_path / "out", table)
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()


def test_what_is_trained_changes_and_what_is_carried_does_not(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_omni_moe")
    model, table = model_for(folder)
    load_hf_folder(model, folder, table)
    with torch.no_grad():
        model.state_dict()[EXPERT.format(1, 3, 1)].mul_(2)
    export_hf_folder(model, folder, tmp_path / "out", table, max_shard_bytes=500_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    before = load_file(folder / "model.safetensors")
    after = {name: tensor for file in set(index.values()) for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert before.keys() == after.keys() and len(set(index.values())) > 3
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"thinker.model.layers.1.mlp.experts.3.{part}_proj.weight" for part in ("gate", "up")}
    assert sum(name.startswith(("talker.", "code2wav.")) for name in after) > 50


def test_a_thinkers_weights_under_the_names_of_the_whole_model(tmp_path: Path) -> None:
    """And the other way round: `transformers` reads either."""
    folder = checkpoint("qwen3_omni_moe")
    model, table = model_for(folder)
    stored = load_file(folder / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    bare = {name.removeprefix("thinker."): tensor for name, tensor in stored.items() if not table.is_carried(name)}
    save_file(bare, tmp_path / "model.safetensors", metadata={"format": "pt"})
    load_hf_folder(model, tmp_path, table)
    got = model.state_dict()["audio.conv_out.weight"]
    assert torch.equal(got, stored["thinker.audio_tower.conv_out.weight"])


def test_what_is_missing_and_what_is_unexpected_is_named(tmp_path: Path) -> None:
    folder = checkpoint("qwen3_omni_moe")
    model, table = model_for(folder)
    stored = load_file(folder / "model.safetensors")
    del stored["thinker.model.layers.2.mlp.experts.1.up_proj.weight"]
    stored["singer.weight"] = torch.zeros(1)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        WeightsError, match=r"1 missing: thinker\.model\.layers\.2\.mlp\.experts\.1\.up_proj\.weight\n  1 unexpected: singer\.weight"
    ):
        load_hf_folder(model, tmp_path, table)
