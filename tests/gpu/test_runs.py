"""Whole runs on a GPU: `swiftcp sft` with a resume, its export, and `swiftcp logprobs` of it, with both backends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from swiftcp.parallel.engine import transformer_engine_problem
from tests.media_rows import write_video
from tests.training_rows import write_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_engine = pytest.mark.skipif(torch.cuda.is_available() and transformer_engine_problem() is not None, reason="needs Transformer Engine")
MACHINE = (1, 1, 1)
"""World size, ranks of this machine, GPUs."""


def train(values: dict[str, Any]) -> list[dict[str, Any]]:
    """What the run logged."""
    from swiftcp.config import Machine, TrainConfig, resolve, validate
    from swiftcp.trainers import sft

    sft.train(validate(resolve(TrainConfig, values=values, environment={}), Machine(*MACHINE)), "sft")
    return [json.loads(line) for line in (Path(values["output_dir"]) / "logging.jsonl").read_text().splitlines()]


def logprobs(values: dict[str, Any]) -> torch.Tensor:
    """Of all rows, one after the other."""
    from swiftcp.config import LogprobsConfig, Machine, resolve, validate
    from swiftcp.trainers import logprobs

    logprobs.run(validate(resolve(LogprobsConfig, values=values, environment={}), Machine(*MACHINE)))
    rows = [json.loads(line) for line in Path(values["output"]).read_text().splitlines()]
    return torch.tensor([value for row in rows for value in row["logprobs"][1:]])


def write_rows_with_videos(folder: Path) -> Path:
    """16 conversations with and without pictures, and 2 about a video file."""
    file = write_rows(folder, 16)
    write_video(folder / "bar.mp4")
    messages = [{"role": "user", "content": "<video>What grows?"}, {"role": "assistant", "content": "A bar."}]
    with file.open("a") as lines:
        lines.write(2 * (json.dumps({"messages": messages, "videos": ["bar.mp4"]}) + "\n"))
    return file


@pytest.mark.parametrize("backend", ["torch", pytest.param("te", marks=needs_engine)])
@pytest.mark.parametrize("packing", [True, False])
def test_train_resume_export_and_score(tiny_qwen3_vl: Path, tmp_path: Path, backend: str, packing: bool) -> None:
    rows = write_rows_with_videos(tmp_path / "rows")
    common = {
        "model": str(tiny_qwen3_vl),
        "dataset": [str(rows)],
        "device": "cuda",
        "attention_backend": backend,
        "packing": packing,
        "max_length": 512,
        "dataloader_num_workers": 0,
    }
    recipe = {**common, "global_batch_size": 2, "train_iters": 4, "save_steps": 2, "lr": 1e-3, "output_dir": str(tmp_path / "run")}
    whole = train(recipe)
    exported, source = (load_file(folder / "model.safetensors") for folder in (tmp_path / "run" / "hf", tiny_qwen3_vl))
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in exported.items()} == {
        name: (tensor.dtype, tensor.shape) for name, tensor in source.items()
    }
    assert [record["iteration"] for record in whole] == [1, 2, 3, 4]

    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.rmtree(checkpoints / "step-000004")
    (checkpoints / "latest").write_text("step-000002\n")
    resumed = train(recipe)
    assert [record["iteration"] for record in resumed] == [1, 2, 3, 4]
    assert [record["loss"] for record in resumed] == pytest.approx([record["loss"] for record in whole], rel=2e-3)

    scored = logprobs({**common, "model": str(tmp_path / "run" / "hf"), "output": str(tmp_path / "trained.jsonl")})
    before = logprobs({**common, "output": str(tmp_path / "untrained.jsonl")})
    assert scored.shape == before.shape and scored.isfinite().all()
    assert scored.mean() > before.mean(), "training raises the likelihood of its rows"
