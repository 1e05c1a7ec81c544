"""Every recipe under examples/ says its command and what to expect, trains for two steps, and resumes to the same numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.media_rows import write_media_rows
from tests.omni_rows import write_omni_rows

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN_TO_RUN = ("iteration", "loss", "grad_norm", "lr", "tokens", "labelled_tokens")
"""Keys of logging.jsonl that must not differ between a run and its resumption."""


def _call(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, *arguments], check=True, timeout=300, env={**os.environ, "OMP_NUM_THREADS": "1"})


Inputs = dict[str, str | Path]
"""Keys of the recipe that a test sets: the tiny model and rows, and sizes that fit two CPU ranks."""


def _quickstart_inputs(folder: Path) -> Inputs:
    _call("-m", "swiftcp", "tiny", "qwen3_vl", folder / "tiny")
    _call(EXAMPLES / "quickstart" / "prepare.py", folder / "data")
    return {"model": folder / "tiny", "dataset": folder / "data" / "train.jsonl"}


def _expert_inputs(family: str, write_rows: Callable[[Path], Path]) -> Callable[[Path], Inputs]:
    def inputs(folder: Path) -> Inputs:
        _call("-m", "swiftcp", "tiny", family, folder / "tiny")
        small: Inputs = {"device": "cpu", "max_length": "2048", "expert_model_parallel_size": "2", "global_batch_size": "2"}
        return {"model": folder / "tiny", "dataset": write_rows(folder), **small}

    return inputs


def _qwen3_5_inputs(folder: Path) -> Inputs:
    _call("-m", "swiftcp", "tiny", "qwen3_5", folder / "tiny")
    small: Inputs = {"device": "cpu", "nproc_per_node": "2", "max_length": "2048", "context_parallel_size": "2", "global_batch_size": "2"}
    return {"model": folder / "tiny", "dataset": write_media_rows(folder), **small}


INPUTS: dict[str, Callable[[Path], Inputs]] = {
    "quickstart/recipe.yaml": _quickstart_inputs,
    "qwen3_vl_moe/sft.yaml": _expert_inputs("qwen3_vl_moe", write_media_rows),
    "qwen3_omni/sft.yaml": _expert_inputs("qwen3_omni_moe", write_omni_rows),
    "qwen3_5/sft.yaml": _qwen3_5_inputs,
}
"""How the model and the rows of each recipe are made."""


def _sft(recipe: str, inputs: Inputs, output_dir: Path, *options: str | Path) -> list[dict]:
    """Train for two steps, each logged and saved. Returns the log."""
    given = [part for key, value in {**inputs, "output_dir": output_dir}.items() for part in (f"--{key}", value)]
    steps = ["--num_train_epochs", "null", "--train_iters", "2", "--logging_steps", "1", "--save_steps", "1"]
    _call("-m", "swiftcp", "sft", EXAMPLES / recipe, *given, *steps, *options)
    return [json.loads(line) for line in (output_dir / "logging.jsonl").read_text(encoding="utf-8").splitlines()]


def test_all_recipes_are_tested() -> None:
    assert {path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.yaml")} == set(INPUTS)


@pytest.mark.parametrize("recipe", INPUTS)
def test_recipe_says_its_command_and_what_to_expect(recipe: str) -> None:
    comment = [line for line in (EXAMPLES / recipe).read_text(encoding="utf-8").splitlines() if line.startswith("#")]
    assert any(line.startswith("# Command: swiftcp ") and line.endswith(f"examples/{recipe}") for line in comment)
    assert any(line.startswith("# Expect: ") for line in comment)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", INPUTS)
def test_recipe_trains_and_resumes(recipe: str, tmp_path: Path) -> None:
    inputs = INPUTS[recipe](tmp_path)
    whole = _sft(recipe, inputs, tmp_path / "whole")
    resumed = _sft(recipe, inputs, tmp_path / "resumed", "--resume", tmp_path / "whole" / "checkpoints" / "step-000001")
    assert [line["iteration"] for line in whole] == [1, 2]
    assert [{key: line[key] for key in RUN_TO_RUN} for line in resumed] == [{key: line[key] for key in RUN_TO_RUN} for line in whole[1:]]
    assert {path.name for path in (tmp_path / "resumed" / "hf").iterdir()} >= {"config.json", "tokenizer.json"}


def test_job_scripts_name_recipes_that_exist() -> None:
    for script in EXAMPLES.rglob("*.sbatch"):
        text = script.read_text(encoding="utf-8")
        assert f"swiftcp sft examples/{script.with_suffix('.yaml').relative_to(EXAMPLES).as_posix()} " in text
        assert "#SBATCH --requeue" in text
        subprocess.run(["bash", "-n", script], check=True)
