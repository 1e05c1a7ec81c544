"""What a rank process does first."""

from __future__ import annotations

import os

import pytest

from swiftcp.rank import prepare_rank


def test_a_rank_on_a_cpu_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    prepare_rank("cuda")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    prepare_rank("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
