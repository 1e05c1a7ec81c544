"""The commands on models with experts, on real media: Qwen3-VL-MoE, and Qwen3-Omni with sound, also that of a video."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.loop_harness import logged, run_export, run_logprobs, run_sft
from tests.distributed.ranks import RankPool
from tests.distributed.test_logprobs import TOLERANCE, oracle_rows
from tests.distributed.test_parity_command import exit_code, options
from tests.media_rows import write_media_rows
from tests.omni_rows import write_omni_rows


@pytest.fixture(scope="module")
def omni_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_omni_rows(tmp_path_factory.mktemp("omni"))


@pytest.fixture(params=["qwen3_vl_moe", "qwen3_omni_moe"])
def model_and_rows(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    if request.param == "qwen3_vl_moe":
        return request.getfixturevalue("tiny_qwen3_vl_moe"), write_media_rows(tmp_path)
    return request.getfixturevalue("tiny_omni"), request.getfixturevalue("omni_rows")


def test_parity_holds(model_and_rows: tuple[Path, Path], ranks: RankPool, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(ranks, [*options(*model_and_rows), "--expert_model_parallel_size", "2"], None) == 0
    table = capsys.readouterr().out
    assert "parity holds" in table and "FAILED" not in table and "experts over ep 2" in table


def test_log_probabilities_of_sound_are_those_of_transformers(ranks: RankPool, tiny_omni: Path, omni_rows: Path, tmp_path: Path) -> None:
    expected = ranks.run(oracle_rows, tiny_omni, omni_rows, num_ranks=1)[0]
    values = {"model": str(tiny_omni), "dataset": [str(omni_rows)], "output": str(tmp_path / "out.jsonl"), "packing_length": 1024}
    ranks.run(run_logprobs, {**values, "max_length": 1024, "context_parallel_size": 2}, num_ranks=2)
    got = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    for ours, theirs in zip(got, expected, strict=True):
        assert ours["input_ids"] == theirs["input_ids"]
        assert torch.tensor(ours["logprobs"][1:]).sub(torch.tensor(theirs["logprobs"])).abs().max() <= TOLERANCE


def test_a_whole_omni_is_trained_resumed_in_another_layout_and_exported(
    ranks: RankPool, tiny_omni: Path, omni_rows: Path, tmp_path: Path
) -> None:
    values: dict[str, Any] = {
        "model": str(tiny_omni),
        "dataset": [str(omni_rows)],
        "output_dir": str(tmp_path / "run"),
        "max_length": 512,
        "global_batch_size": 2,
        "train_iters": 2,
        "save_steps": 1,
        "moe_aux_loss_coeff": 0.01,
        "moe_z_loss_coeff": 0.001,
    }
    experts_spread = {"expert_model_parallel_size": 2, "context_parallel_size": 2}
    assert ranks.run(run_sft, {**values, **experts_spread}, num_ranks=2) == ["done"] * 2
    first = tmp_path / "run" / "checkpoints" / "step-000001"
    others = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "resume": str(first), "output_dir": str(tmp_path / "resumed")}
    assert ranks.run(run_sft, {**values, **others}, num_ranks=2) == ["done"] * 2
    whole, resumed = logged(tmp_path / "run")[1], logged(tmp_path / "resumed")[0]
    for key in ("loss", "grad_norm", "load_balancing_loss", "z_loss"):
        assert resumed[key] == pytest.approx(whole[key], rel=1e-5), key
    exporting = {"checkpoint": first.with_name("step-000002"), "model": tiny_omni, "output": tmp_path / "exported"}
    assert ranks.run(run_export, exporting, num_ranks=1) == ["done"]
    assert _files(tmp_path / "exported") == _files(tmp_path / "run" / "hf")
    before, after = (load_file(folder / "model.safetensors") for folder in (tiny_omni, tmp_path / "run" / "hf"))
    assert before.keys() == after.keys()
    changed = {name.split(".")[0] for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"thinker"}
    assert {name.split(".")[0] for name in before} == {"thinker", "talker", "code2wav"}


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
