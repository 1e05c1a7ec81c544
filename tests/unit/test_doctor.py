"""`swiftcp doctor`: the report, what it keeps to itself, and its self-test."""

from __future__ import annotations

import pytest

import swiftcp
from swiftcp import doctor
from swiftcp.cli import main


@pytest.mark.parametrize(("code", "line"), [(0, "2 ranks: all-reduce is right"), (7, "2 ranks: failed with exit code 7")])
def test_report_and_exit_code(monkeypatch, capsys, code, line):
    monkeypatch.setattr(doctor, "count_gpus", lambda environment: 0)
    monkeypatch.setattr(doctor, "launch_local", lambda *_, **__: code)
    monkeypatch.setenv("SLURM_JWT", "hunter2")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    assert main(["doctor"]) == min(code, 1)
    text = capsys.readouterr().out
    for part in (
        f"| swiftcp | {swiftcp.__version__} |",
        "| torch | 2.",
        line,
        "libavcodec",
        "GiB free",
        "    NCCL_DEBUG=INFO",
        "SLURM_JWT=***",
    ):
        assert part in text
    assert "hunter2" not in text


def test_self_test_adds_up_over_two_ranks(monkeypatch):
    monkeypatch.setattr(doctor, "count_gpus", lambda environment: 0)
    assert doctor._communication() == ("- gloo, 2 ranks: all-reduce is right", True)
