"""The comparisons of `swiftcp parity`: what is different is found wherever it lies, and NaN is never equal."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch

from swiftcp.config import ParityConfig, resolve
from swiftcp.errors import TrainingError
from swiftcp.trainers.gradient_sketch import sketch
from swiftcp.trainers.parity import FLOAT32, Check, compare, run


def stage(**changes: Any) -> dict[str, Any]:
    """What a stage writes of two rows and two parameters."""
    generator = torch.Generator().manual_seed(0)
    gradients = {name: asdict(sketch(name, torch.randn(40, generator=generator))) for name in ("a", "b")}
    result = {"num_labels": 3, "loss": 2.5, "grad_norm": 9.0, "gradients": gradients, "logprobs": [[-1.0, -2.0, -30.0], [-0.5]]}
    return {**result, **changes}


def failed(layout: dict[str, Any], one_rank: dict[str, Any] | None = None, oracle: dict[str, Any] | None = None) -> list[Check]:
    return [check for check in compare(layout, one_rank or stage(), oracle or stage(), FLOAT32) if not check.passed]


def test_equal_stages_pass() -> None:
    assert failed(stage()) == []


@pytest.mark.parametrize("wrong", [-1.1, math.nan])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_wrong_log_probability_is_found_wherever_it_stands(wrong: float, place: int) -> None:
    logprobs = copy.deepcopy(stage()["logprobs"])
    logprobs[0][place] += wrong
    found = failed(stage(logprobs=logprobs))
    assert [check.detail for check in found] == [f"row 0, token {place + 1}"] * 2
    assert ["one rank" in found[0].what, "transformers" in found[1].what] == [True, True]
    assert len(failed(stage(), oracle=stage(logprobs=logprobs))) == 2


def test_rows_that_are_missing_are_an_error() -> None:
    with pytest.raises(ValueError, match="longer"):
        compare(stage(logprobs=[[-1.0, -2.0, -30.0]]), stage(), stage(), FLOAT32)


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("factor", [1.001, -1.0, 0.0, math.nan])
def test_a_wrong_gradient_is_found_and_named(name: str, factor: float) -> None:
    """Also one of the right length."""
    gradients = copy.deepcopy(stage()["gradients"])
    wrong = gradients[name]
    gradients[name] = {"norm": abs(factor) * wrong["norm"], "products": [factor * product for product in wrong["products"]]}
    [found] = failed(stage(gradients=gradients))
    assert "each gradient" in found.what and found.detail == name


@pytest.mark.parametrize("key", ["loss", "grad_norm"])
@pytest.mark.parametrize("factor", [1.0001, math.nan])
def test_a_wrong_loss_or_norm_is_found(key: str, factor: float) -> None:
    [found] = failed(stage(**{key: stage()[key] * factor}))
    assert found.what.startswith({"loss": "loss", "grad_norm": "gradient norm"}[key])


@pytest.mark.parametrize("code", [2, 130, 143])
def test_a_stage_that_was_stopped_ends_all(code: int) -> None:
    resolved = resolve(ParityConfig, ["--model", "m", "--dataset", "d"], environment={})
    assert run(resolved, start=lambda task, num_ranks: code) == code


def test_a_stage_that_failed_is_named() -> None:
    resolved = resolve(ParityConfig, ["--model", "m", "--dataset", "d"], environment={})
    with pytest.raises(TrainingError, match="stage 'transformers' ended with exit code 137"):
        run(resolved, start=lambda task, num_ranks: 137)


def test_another_number_of_labels_is_all_that_is_told() -> None:
    [found] = failed(stage(num_labels=4, loss=1.0))
    assert found.what == "labelled tokens" and found.difference == math.inf
