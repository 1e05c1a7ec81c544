"""The learning rate's schedule against its formula."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from swiftcp.config.concerns import TrainConfig
from swiftcp.trainers.optimizer import build_scheduler, warmup_iters


def config(**values: Any) -> TrainConfig:
    return TrainConfig(model="m", dataset=["d"], lr=1e-3, **values)


def rates(settings: TrainConfig, train_iters: int) -> list[float]:
    """The rate of each optimizer step."""
    group: dict[str, Any] = {"max_lr": settings.lr, "min_lr": settings.min_lr}
    optimizer: Any = SimpleNamespace(param_groups=[group])
    scheduler = build_scheduler(optimizer, settings, train_iters)
    result = []
    for _ in range(train_iters):
        result.append(group["lr"])
        scheduler.step(1)
    return result


def test_warm_up_then_cosine() -> None:
    got = rates(config(lr_warmup_iters=2, min_lr=1e-4), 6)
    cosine = [1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert got == pytest.approx([0.0, 0.5e-3, *cosine])


def test_linear_and_constant() -> None:
    assert rates(config(lr_decay_style="linear"), 4) == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert rates(config(lr_decay_style="constant"), 3) == pytest.approx([1e-3] * 3)


@pytest.mark.parametrize(("fraction", "train_iters", "expected"), [(None, 10, 3), (0.25, 10, 2), (0.99, 2, 1), (0.5, 1, 0)])
def test_warm_up_is_shorter_than_the_run(fraction: float | None, train_iters: int, expected: int) -> None:
    settings = config(lr_warmup_fraction=fraction, lr_warmup_iters=3 if fraction is None else 0)
    assert warmup_iters(settings, train_iters) == expected


def test_each_group_rises_and_falls_between_its_own_limits() -> None:
    settings = config(lr_warmup_iters=2, lr_decay_style="linear", min_lr=1e-6)
    groups: list[dict[str, Any]] = [{"max_lr": peak, "min_lr": 1e-6} for peak in (1e-3, 1e-5)]
    optimizer: Any = SimpleNamespace(param_groups=groups)
    scheduler = build_scheduler(optimizer, settings, 4)
    series = []
    for _ in range(5):
        series.append(([group["lr"] for group in groups], scheduler.get_lr({})))
        scheduler.step(1)
    for step, (rates, logged) in enumerate(series):
        part = [0, 0.5, 1][step] if step <= 2 else None
        for rate, peak in zip(rates, (1e-3, 1e-5), strict=True):
            assert rate == pytest.approx(part * peak if part is not None else 1e-6 + (4 - step) / 2 * (peak - 1e-6))
        assert logged == rates[0]
