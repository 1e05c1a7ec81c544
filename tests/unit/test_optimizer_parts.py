"""The state of one optimizer goes into two, and that of two into one, whatever kind of state it is."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swiftcp.checkpoint.optimizer_parts import in_as_many_parts


def optimizer(*parts: list[dict[str, Any]]) -> Any:
    return SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=SimpleNamespace(param_groups=groups)) for groups in parts])


DENSE = {"lr": 0.5, "params": ["a", "b"], "is_expert_parallel": False}
EXPERTS = {"lr": 0.5, "params": ["c"], "is_expert_parallel": True}


def test_as_many_as_were_saved_stay_as_they_are() -> None:
    state: dict[Any, Any] = {0: {"param_groups": [DENSE]}, 1: {"param_groups": [EXPERTS]}}
    assert in_as_many_parts(state, state, optimizer([DENSE], [EXPERTS])) is state


def test_one_into_two() -> None:
    saved = {"state": {"common_step": 3}, "param_groups": [{"lr": 0.1}]}
    read = {**saved, 0: {"state": {0: "A", 1: "B"}, "param_groups": [{"params": [0, 1]}]}, 1: {"state": {0: "C"}, "param_groups": []}}
    got = in_as_many_parts(read, saved, optimizer([DENSE], [EXPERTS]))
    assert got == {
        0: {"state": {"common_step": 3, 0: "A", 1: "B"}, "param_groups": [{**DENSE, "params": [0, 1]}]},
        1: {"state": {"common_step": 3, 0: "C"}, "param_groups": [{**EXPERTS, "params": [0]}]},
    }


def test_one_into_two_of_a_kind_that_reads_no_groups() -> None:
    saved = {"optimizer": {"param_groups": [{"lr": 0.1, "step": 7}]}}
    got = in_as_many_parts({**saved, 0: {"shares": "A"}, 1: {"shares": "B"}}, saved, optimizer([DENSE], [EXPERTS]))
    assert got == {
        0: {"shares": "A", "optimizer": {"param_groups": [{**DENSE, "step": 7, "params": [0, 1]}]}},
        1: {"shares": "B", "optimizer": {"param_groups": [{**EXPERTS, "step": 7, "params": [0]}]}},
    }


@pytest.mark.parametrize("count", [{}, {"step": 7}], ids=["PyTorch", "Transformer Engine"])
def test_two_into_one_of_mixed_precision(count: dict[str, int]) -> None:
    saved = {number: {"optimizer": {"param_groups": [{"lr": 0.1, **count}]}, "grad_scaler": None} for number in (0, 1)}
    read = {**saved, "optimizer": {"state": {}}, "masters": "M"}
    got = in_as_many_parts(read, saved, optimizer([DENSE, {**EXPERTS, "is_expert_parallel": False}]))
    groups = [{**DENSE, **count, "params": [0, 1]}, {**EXPERTS, **count, "params": [2], "is_expert_parallel": False}]
    assert got == {"optimizer": {"state": {}, "param_groups": groups}, "masters": "M", "grad_scaler": None}
