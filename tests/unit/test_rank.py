"""What a rank process does first."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swiftcp.rank import prepare_rank, stoppable_at_once


def test_a_rank_on_a_cpu_sees_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    prepare_rank("cuda")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"
    prepare_rank("cpu")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize(
    ("goes_on", "signum", "exit_code", "told"),
    [
        (True, signal.SIGTERM, 75, "asked to stop outside of the training steps: nothing new to save; start the run again to go on"),
        (True, signal.SIGUSR1, 75, "asked to stop outside of the training steps: nothing new to save; start the run again to go on"),
        (False, signal.SIGTERM, 143, "stopped by SIGTERM"),
    ],
)
def test_a_stop_outside_of_the_training_steps_ends_at_once_and_says_so(goes_on: bool, signum: int, exit_code: int, told: str) -> None:
    code = f"""
import time
from swiftcp.rank import stoppable_at_once
with stoppable_at_once(first_rank=True, goes_on={goes_on}):
    print("ready", flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == exit_code
    assert errors == f"swiftcp: {told}\n"


def test_what_handles_the_signal_goes_first() -> None:
    received: list[int] = []
    before = signal.getsignal(signal.SIGUSR1)
    with stoppable_at_once(first_rank=True):
        inner = signal.signal(signal.SIGUSR1, lambda number, _: received.append(number))
        os.kill(os.getpid(), signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, inner)
    assert received == [signal.SIGUSR1] and signal.getsignal(signal.SIGUSR1) == before
