"""`swiftcp export` of a run's checkpoint gives the bytes of the run's own `hf` folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.loop_harness import run_export, run_sft
from tests.distributed.ranks import RankPool
from tests.training_rows import write_rows


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tiny_qwen3_vl: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(run on two pipeline stages, in a narrower type than the model is stored in; the model, moved behind it)."""
    folder = tmp_path_factory.mktemp("export")
    model = shutil.copytree(tiny_qwen3_vl, folder / "model")
    values: dict[str, Any] = {
        "model": str(model),
        "dataset": [str(write_rows(folder / "rows", 9))],
        "output_dir": str(folder / "run"),
        "pipeline_model_parallel_size": 2,
        "torch_dtype": "bfloat16",
        "max_length": 144,
        "pack_align": 8,
        "global_batch_size": 2,
        "train_iters": 1,
        "no_save_optim": True,
        "freeze_vit": True,
    }
    assert ranks.run(run_sft, values, num_ranks=2) == ["done", "done"]
    return folder / "run", model.rename(folder / "moved")


def test_one_rank_and_several_export_the_bytes_of_the_run(ranks: RankPool, trained: tuple[Path, Path], tmp_path: Path) -> None:
    run, model = trained
    values = {"checkpoint": run / "checkpoints" / "step-000001", "model": model}
    layouts: list[tuple[int, dict[str, Any]]] = [(1, {}), (2, {"tensor_model_parallel_size": 2}), (2, {})]
    for number, (num_ranks, layout) in enumerate(layouts):
        output = tmp_path / str(number)
        assert ranks.run(run_export, {**values, **layout, "output": output}, num_ranks=num_ranks) == ["done"] * num_ranks
        assert contents(output) == contents(run / "hf")
    assert (output / "model.safetensors").read_bytes() != (model / "model.safetensors").read_bytes()


def test_a_damaged_checkpoint_is_an_error_that_names_the_file(ranks: RankPool, trained: tuple[Path, Path], tmp_path: Path) -> None:
    run, model = trained
    checkpoint = shutil.copytree(run / "checkpoints" / "step-000001", tmp_path / "step-000001")
    shard = next(checkpoint.glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    [answer] = ranks.run(run_export, {"checkpoint": checkpoint, "model": model, "output": tmp_path / "out"}, num_ranks=1)
    assert answer.startswith("ConfigError") and str(shard) in answer
    assert not (tmp_path / "out").exists()
