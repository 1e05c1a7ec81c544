"""Local ranks: their environment, failures, hangs, signals, and that none is ever left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from swiftcp.launch import base_environment, count_gpus, launch_local

REPOSITORY = Path(__file__).resolve().parents[2]


def program(folder: Path, text: str) -> tuple[str, ...]:
    """A prefix that runs this text in each rank; `rank` is defined, and `note(name)` writes a file with the process id."""
    path = folder / "program.py"
    preamble = f"""
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def note(name):
    pathlib.Path({str(folder)!r}, name).write_text(str(os.getpid()))
"""
    path.write_text(preamble + text, encoding="utf-8")
    return sys.executable, str(path)


def wait_for(*paths: Path, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not all(path.exists() and path.read_text() for path in paths):
        assert time.monotonic() < deadline, f"{paths} did not appear"
        time.sleep(0.02)


def is_alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


def assert_gone(*files: Path) -> None:
    process_ids = [int(file.read_text()) for file in files]
    deadline = time.monotonic() + 5
    while any(is_alive(process_id) for process_id in process_ids):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.02)


def start_launcher(folder: Path, text: str, grace_seconds: float = 10) -> subprocess.Popen[str]:
    """A process that launches two ranks of this text."""
    prefix = program(folder, text)
    call = f"launch_local([], 2, prefix={prefix!r}, grace_seconds={grace_seconds})"
    code = f"import sys; from swiftcp.launch import launch_local; sys.exit({call})"
    return subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)


def test_each_rank_gets_its_variables(tmp_path):
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "X"]
    text = f"pathlib.Path({str(tmp_path)!r}, f'rank{{rank}}').write_text(str([os.environ.get(n) for n in {names!r}] + sys.argv[1:]))"
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", X="x", OMP_NUM_THREADS="3")
    assert launch_local(["a", "b"], 2, environment, prefix=program(tmp_path, text)) == 0
    for rank in ("0", "1"):
        expected = [rank, rank, "2", "2", "127.0.0.1", "3", None, "x", "a", "b"]
        assert (tmp_path / f"rank{rank}").read_text() == str(expected)


def test_second_node(tmp_path):
    text = "sys.exit(0 if os.environ['RANK'] == str(2 + int(os.environ['LOCAL_RANK'])) and os.environ['WORLD_SIZE'] == '4' else 1)"
    arguments = dict(node_rank=1, num_nodes=2, master_addr="node0", master_port=29500)
    assert launch_local([], 2, prefix=program(tmp_path, text), **arguments) == 0


def test_cores_are_shared_by_ranks():
    cores = os.cpu_count() or 1
    assert base_environment({}, 1)["OMP_NUM_THREADS"] == str(cores)
    assert base_environment({}, 2 * cores)["OMP_NUM_THREADS"] == "1"


def test_bytecode_is_kept_elsewhere_where_packages_are_read_only(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "access", lambda *_: False)
    environment = base_environment({"XDG_CACHE_HOME": str(tmp_path)}, 1)
    assert environment["PYTHONPYCACHEPREFIX"] == str(tmp_path / "swiftcp" / "bytecode")


def test_a_failing_rank_stops_the_others(tmp_path, capfd):
    text = """
if rank == 1:
    while not pathlib.Path(__file__).with_name("zero").exists():
        time.sleep(0.02)
    print("what went wrong", file=sys.stderr, flush=True)
    sys.exit(7)
note("zero")
time.sleep(600)
"""
    started = time.monotonic()
    assert launch_local([], 2, prefix=program(tmp_path, text)) == 7
    assert time.monotonic() - started < 8
    assert_gone(tmp_path / "zero")
    errors = capfd.readouterr().err.splitlines()
    assert errors == ["what went wrong", "swiftcp: rank 1 ended with exit code 7, the other ranks are stopped"]


def test_a_rank_that_ignores_sigterm_is_killed_with_its_children(tmp_path, capfd):
    text = """
if rank == 1:
    while not pathlib.Path(__file__).with_name("zero").exists():
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
note("zero")
time.sleep(600)
"""
    arguments = dict(node_rank=1, num_nodes=2, master_addr="node0", master_port=29500)
    text = f"rank -= 2\n{text}"
    assert launch_local([], 2, prefix=program(tmp_path, text), grace_seconds=0.3, **arguments) == 128 + signal.SIGKILL
    assert_gone(tmp_path / "zero", tmp_path / "child")
    assert capfd.readouterr().err.startswith("swiftcp: rank 3 was killed by SIGKILL (systems do so where memory runs out)")


@pytest.mark.parametrize(("code", "expected"), [(0, 1), (75, 75)])
def test_a_rank_that_does_not_end_with_the_others_is_killed(tmp_path, capfd, code, expected):
    text = f"note('zero') if rank == 0 else sys.exit({code})\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)"
    assert launch_local([], 2, prefix=program(tmp_path, text), end_seconds=0.5) == expected
    assert_gone(tmp_path / "zero")
    assert capfd.readouterr().err == "swiftcp: rank 1 ended, but rank 0 did not: killed. The output before says what was saved\n"


def test_of_several_that_fail_the_one_that_was_killed_is_named(tmp_path, capfd):
    text = """
if rank == 1:
    note("one")
    os.kill(os.getpid(), signal.SIGKILL)
while not pathlib.Path(__file__).with_name("one").exists():
    pass
os.abort()
"""
    assert launch_local([], 2, prefix=program(tmp_path, text)) == 128 + signal.SIGKILL
    assert capfd.readouterr().err.splitlines()[-1].startswith("swiftcp: rank 1 was killed by SIGKILL")


def test_a_preempted_run_lets_all_ranks_end(tmp_path):
    text = "time.sleep(0.5 * rank); note(f'rank{rank}'); sys.exit(75)"
    assert launch_local([], 2, prefix=program(tmp_path, text), grace_seconds=0) == 75
    assert (tmp_path / "rank1").exists()


HANGING = """
def stop(signum, frame):
    note(f"signal{signum}-{rank}")
    sys.exit(75 if signum == signal.SIGTERM else 130)
signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
note(f"rank{rank}")
time.sleep(600)
"""


INTERRUPTED = "swiftcp: interrupted: the ranks are stopped\n"


@pytest.mark.parametrize(
    ("signum", "code", "told"), [(signal.SIGTERM, 75, ""), (signal.SIGUSR1, 75, ""), (signal.SIGINT, 130, INTERRUPTED)]
)
def test_signals_are_passed_on(tmp_path, signum, code, told):
    launcher = start_launcher(tmp_path, HANGING)
    wait_for(tmp_path / "rank0", tmp_path / "rank1")
    launcher.send_signal(signum)
    assert launcher.wait(20) == code
    passed_on = int(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)
    wait_for(tmp_path / f"signal{passed_on}-0", tmp_path / f"signal{passed_on}-1")
    assert_gone(tmp_path / "rank0", tmp_path / "rank1")
    assert launcher.stderr is not None and launcher.stderr.read() == told


def test_sigterm_behind_sigusr1_does_not_cut_a_checkpoint_short(tmp_path):
    text = "signal.signal(signal.SIGTERM, lambda *_: None)\nnote(f'rank{rank}')\nend = time.monotonic() + 2\n"
    launcher = start_launcher(tmp_path, text + "while time.monotonic() < end: time.sleep(0.1)\nsys.exit(75)", grace_seconds=0.1)
    wait_for(tmp_path / "rank0", tmp_path / "rank1")
    for signum in (signal.SIGUSR1, signal.SIGTERM):
        launcher.send_signal(signum)
        time.sleep(0.2)
    assert launcher.wait(20) == 75


def test_an_interrupt_that_ranks_ignore_kills_them(tmp_path):
    launcher = start_launcher(tmp_path, "signal.signal(signal.SIGINT, signal.SIG_IGN); note(f'rank{rank}'); time.sleep(600)", 0.3)
    wait_for(tmp_path / "rank0", tmp_path / "rank1")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(20) == 130
    assert_gone(tmp_path / "rank0", tmp_path / "rank1")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs PR_SET_PDEATHSIG")
def test_ranks_die_with_a_launcher_that_is_killed(tmp_path):
    launcher = start_launcher(tmp_path, HANGING)
    wait_for(tmp_path / "rank0", tmp_path / "rank1")
    launcher.kill()
    launcher.wait(20)
    assert_gone(tmp_path / "rank0", tmp_path / "rank1")


def test_gpus_are_counted_without_torch(monkeypatch, tmp_path):
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.setattr("swiftcp.launch.Path", lambda path: tmp_path if path == "/dev" else Path(path))
    assert count_gpus({}) == 3
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,2"}) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,-1,2"}) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}) == 0


def test_a_torch_without_cuda_uses_no_gpus(monkeypatch):
    monkeypatch.setattr("swiftcp.launch.metadata.version", lambda package: "2.11.0+cpu")
    monkeypatch.setattr("swiftcp.launch.Path", lambda path: pytest.fail("looked for devices"))
    assert count_gpus({}) == 0


def test_no_gpus(monkeypatch, tmp_path):
    monkeypatch.setattr("swiftcp.launch.Path", lambda path: tmp_path)
    monkeypatch.setattr("swiftcp.launch.shutil.which", lambda name: None)
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "0,1"}) == 0
