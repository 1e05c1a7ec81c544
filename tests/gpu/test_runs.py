"""Whole runs on a GPU: `swiftcp sft` with a resume, its export, and `swiftcp logprobs` of it, with both backends."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from swiftcp.parallel.engine import transformer_engine_problem
from tests.gpu.harness import write_random_folder
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


def write_long_rows(folder: Path, num_rows: int) -> Path:
    """Conversations of some 7,900 tokens of text and a picture of 64, four of which fill a pack of 32,768."""
    folder.mkdir()
    draw = random.Random(0)
    rows = []
    for number in range(num_rows):
        pixels = np.random.default_rng(number).integers(0, 255, (256, 256, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        answer = "".join(draw.choice("bcdfghjklmnpqrstvwxz") for _ in range(7900))
        messages = [{"role": "user", "content": "<image>Go on."}, {"role": "assistant", "content": answer}]
        rows.append(json.dumps({"messages": messages, "images": [f"{number}.png"]}))
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return folder / "rows.jsonl"


def write_2b_with_tokenizer(tiny: Path, folder: Path) -> Path:
    """The 2B shape with the tiny model's tokenizer and processor."""
    own = json.loads((tiny / "config.json").read_text())
    write_random_folder("qwen3_vl_2b", folder, changes={key: own[key] for key in own if key.endswith("_token_id")})
    for file in tiny.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and not (folder / file.name).exists() and "index" not in file.name:
            shutil.copy(file, folder)
    return folder


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@needs_engine
def test_the_2b_shape_saves_resumes_and_exports(tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    """Packs of 32,768 tokens, distributed optimizer, a resume from half way, `swiftcp export` of the last checkpoint."""
    from swiftcp.run import run

    recipe = {
        "model": str(write_2b_with_tokenizer(tiny_qwen3_vl, tmp_path / "2b")),
        "dataset": [str(write_long_rows(tmp_path / "rows", 24))],
        "device": "cuda",
        "max_length": 32768,
        "global_batch_size": 1,
        "train_iters": 6,
        "save_steps": 3,
        "recompute_granularity": "full",
        "output_dir": str(tmp_path / "run"),
    }
    whole = train(recipe)
    print(*("\n" + json.dumps(record) for record in whole))
    checkpoints = tmp_path / "run" / "checkpoints"
    code = run("export", ["--checkpoint", str(checkpoints / "step-000006"), "--output", str(tmp_path / "exported")])
    assert code == 0
    exported, hf = (weights_of(folder) for folder in (tmp_path / "exported", tmp_path / "run" / "hf"))
    assert exported.keys() == hf.keys() and all(torch.equal(exported[name], hf[name]) for name in hf)
    shutil.rmtree(checkpoints / "step-000006")
    (checkpoints / "latest").write_text("step-000003\n")
    resumed = train(recipe)
    assert [record["iteration"] for record in resumed] == [1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in resumed] == pytest.approx([record["loss"] for record in whole], rel=2e-3)
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "2b")
