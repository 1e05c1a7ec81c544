"""Adapters: PEFT on `transformers` gives what we give, every layout gives what one rank gives, and nothing is lost on the way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.layout_harness import (
    LAYOUTS,
    PACKS,
    Measurement,
    differences,
    gradients_of_modes,
    measure_packed,
    over_bounds,
)
from tests.distributed.loop_harness import logged, run_export, run_sft
from tests.distributed.lora_harness import (
    LORA,
    bytes_in_bfloat16,
    dropped,
    measure_adapter,
    measure_peft,
    read_tensors,
    rewrite,
    saved_parameters,
    transformers_logprobs,
    whole_factors_after_steps,
    write_random_adapter,
)
from tests.distributed.ranks import RankPool
from tests.distributed.test_layouts import RECOMPUTE, check_gradients
from tests.distributed.test_parity_command import exit_code, options
from tests.media_rows import write_media_rows
from tests.training_rows import write_rows

LLM_ALONE = {"freeze_vit": True, "freeze_aligner": True}


@pytest.fixture(scope="module")
def adapter(ranks: RankPool, tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every linear layer, beside an aligner that is trained whole."""
    output = tmp_path_factory.mktemp("lora") / "adapter"
    ranks.run(write_random_adapter, tiny_qwen3_vl, output, {"modules_to_save": ["aligner"]}, num_ranks=1)
    return output


@pytest.fixture(scope="module")
def one_rank(ranks: RankPool, tiny_qwen3_vl: Path, adapter: Path) -> Measurement:
    return ranks.run(measure_adapter, tiny_qwen3_vl, adapter, {}, PACKS, num_ranks=1)[0]


def test_peft_gives_the_same_losses_and_gradients(ranks: RankPool, tiny_qwen3_vl: Path, adapter: Path, one_rank: Measurement) -> None:
    expected = ranks.run(measure_peft, tiny_qwen3_vl, adapter, PACKS, num_ranks=1)[0]
    found = differences(one_rank, expected)
    print(found)
    assert over_bounds(found) == {}
    plain = ranks.run(measure_packed, tiny_qwen3_vl, {}, PACKS, num_ranks=1)[0]
    assert (plain.logprobs - expected.logprobs).abs().max() > 0.1  # the adapter says something


@pytest.mark.parametrize("name", ["TP2", "TP2+SP+CP2", "PP2+CP2", "TP2+SP+DP2, distributed optimizer"])
def test_a_layout_gives_what_one_rank_gives(name: str, ranks: RankPool, tiny_qwen3_vl: Path, adapter: Path, one_rank: Measurement) -> None:
    layout = LAYOUTS[name]
    results = ranks.run(measure_adapter, tiny_qwen3_vl, adapter, layout.keys, PACKS, num_ranks=layout.num_ranks)
    print(name, differences(results[0], one_rank))
    assert [over_bounds(differences(result, one_rank)) for result in results] == [{}] * layout.num_ranks


@pytest.mark.parametrize(
    ("name", "more"), [("PP2", LLM_ALONE), ("TP2+SP", {"lora_dropout": 0.3})], ids=["PP2, language model", "TP2+SP, all, dropout"]
)
def test_recomputation_leaves_gradients_as_they_are(
    name: str, more: dict[str, Any], ranks: RankPool, tiny_qwen3_vl: Path, tmp_path: Path
) -> None:
    """With the embedding and the tower frozen nothing that is recomputed has an input that requires a gradient by itself."""
    ranks.run(write_random_adapter, tiny_qwen3_vl, tmp_path / "adapter", more if more is LLM_ALONE else {}, num_ranks=1)
    keys = {**LORA, "adapters": str(tmp_path / "adapter"), **LAYOUTS[name].keys, **more}
    expected, *others = ranks.run(gradients_of_modes, tiny_qwen3_vl, keys, [{}, *RECOMPUTE], num_ranks=2)[0]
    assert min(gradient.abs().max() for gradient in expected.values()) > 0
    for gradients in others:
        check_gradients(gradients, expected)


def test_experts_and_routers_get_no_adapter(ranks: RankPool, tiny_qwen3_vl_moe: Path, tmp_path: Path) -> None:
    ranks.run(write_random_adapter, tiny_qwen3_vl_moe, tmp_path / "adapter", LLM_ALONE, num_ranks=1)
    names = {name.partition(".lora_")[0].partition(".layers.")[2] for name in read_tensors(tmp_path / "adapter")}
    attention = {f"{layer}.self_attn.{matrix}_proj" for layer in range(4) for matrix in "qkvo"}
    assert names == attention | {f"1.mlp.{matrix}_proj" for matrix in ("gate", "up", "down")}  # layer 1 has no experts


def test_dropout_is_that_of_the_tokens(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    """The same on ranks that have the same inputs, another one wherever they are not."""
    same = {"TP2": {"ColumnParallelAdapter"}, "TP2+SP": set(), "DP2": set(), "PP2": set()}
    for name, shared in same.items():
        first, second = ranks.run(dropped, tiny_qwen3_vl, LAYOUTS[name].keys, num_ranks=2)
        kinds = {"ColumnParallelAdapter", "RowParallelAdapter"}
        assert {kind for kind in kinds if torch.equal(first[kind], second[kind])} == shared
        assert first["RowParallelAdapter"].unique().tolist() == [0, 2]
    for name in ("TP2", "TP2+SP"):
        first, second = ranks.run(whole_factors_after_steps, tiny_qwen3_vl, LAYOUTS[name].keys, num_ranks=2)
        assert all(torch.equal(first[parameter], second[parameter]) for parameter in first)


@pytest.mark.parametrize("name", ["TP2+SP", "TP2+SP+PP2"])
def test_an_adapter_is_read_and_written_again_or_merged(
    name: str, ranks: RankPool, tiny_qwen3_vl: Path, adapter: Path, one_rank: Measurement, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    ranks.run(rewrite, tiny_qwen3_vl, adapter, tmp_path / "again", layout.keys, False, num_ranks=layout.num_ranks)
    assert {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()} == {
        path.name: path.read_bytes() for path in adapter.iterdir()
    }
    ranks.run(rewrite, tiny_qwen3_vl, adapter, tmp_path / "merged", layout.keys, True, num_ranks=layout.num_ranks)
    merged = ranks.run(transformers_logprobs, tmp_path / "merged", PACKS, num_ranks=1)[0]
    assert ((merged - one_rank.logprobs).abs() / one_rank.logprobs.abs().clamp(min=1)).max() <= 1e-5


def test_a_frozen_base_is_kept_once(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    """In bfloat16: 2 bytes a weight, and 4 bytes each for gradient, master and two moments of what is trained alone."""
    [found] = ranks.run(bytes_in_bfloat16, tiny_qwen3_vl, {}, num_ranks=1)
    print(found)
    trained, frozen = found["trained"], found["frozen"]
    assert frozen > 10 * trained
    assert (found["weights"], found["masters"], found["moments"]) == (2 * (trained + frozen), 4 * trained, 8 * trained)
    assert 4 * trained <= found["gradients"] < 4.2 * trained


def test_a_stage_without_adapters_saves_nothing(ranks: RankPool, tiny_qwen3_vl: Path) -> None:
    """Or a layout in which it has a part of those that others have would find nothing of the rest."""
    first, last = ranks.run(saved_parameters, tiny_qwen3_vl, {"freeze_llm": True, "pipeline_model_parallel_size": 2}, num_ranks=2)
    assert last == set() and first and all(".adapter." in name for name in first)


def test_a_run_saves_what_is_trained_alone_resumes_and_exports(ranks: RankPool, tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "model": str(tiny_qwen3_vl),
        "dataset": [str(write_rows(tmp_path / "rows", 9))],
        "output_dir": str(tmp_path / "run"),
        **{"max_length": 144, "pack_align": 8, "global_batch_size": 2, "train_iters": 3, "save_steps": 2, "lr": 1e-2},
        **{**LORA, "modules_to_save": ["aligner"], "target_modules": ["q_proj", "v_proj", "mlp.gate_proj", "attn.qkv"]},
    }
    assert ranks.run(run_sft, {**values, **LAYOUTS["TP2+SP"].keys}, num_ranks=2) == ["done", "done"]
    resumed = {**values, "output_dir": str(tmp_path / "resumed"), "resume": str(tmp_path / "run" / "checkpoints" / "step-000002")}
    assert ranks.run(run_sft, {**resumed, "merge_lora": True, **LAYOUTS["PP2"].keys}, num_ranks=2) == ["done", "done"]
    [whole], [again] = ([line for line in logged(tmp_path / run) if line["iteration"] == 3] for run in ("run", "resumed"))
    assert again["loss"] == pytest.approx(whole["loss"], rel=1e-5) and again["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    shards = sum(path.stat().st_size for path in (tmp_path / "run" / "checkpoints" / "step-000003").glob("*.distcp"))
    adapter = read_tensors(tmp_path / "run" / "hf")
    assert shards < 4 * sum(tensor.nbytes for tensor in adapter.values()) < (tiny_qwen3_vl / "model.safetensors").stat().st_size * 4
    for merge, reference in ((False, "run"), (True, "resumed")):
        export = {"checkpoint": tmp_path / "run" / "checkpoints" / "step-000003", "output": tmp_path / f"merge {merge}"}
        assert ranks.run(run_export, {**export, "merge_lora": merge}, num_ranks=1) == ["done"]
        exported, expected = read_tensors(tmp_path / f"merge {merge}"), read_tensors(tmp_path / reference / "hf")
        assert exported.keys() == expected.keys()
        assert max((exported[name] - tensor).abs().max().item() for name, tensor in expected.items()) < (1e-4 if merge else 1e-9)
    described = json.loads((tmp_path / "run" / "hf" / "adapter_config.json").read_text())
    assert described["r"] == 3 and described["base_model_name_or_path"] == str(tiny_qwen3_vl)
    assert {name.rpartition(".")[2] for name in described["target_modules"]} == {"q_proj", "v_proj", "gate_proj", "qkv"}


def test_parity_holds_with_an_adapter(
    ranks: RankPool, tiny_qwen3_vl: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*options(tiny_qwen3_vl, write_media_rows(tmp_path)), "--adapters", str(adapter)]
    assert exit_code(ranks, arguments, None) == 0
    assert "parity holds" in capsys.readouterr().out
