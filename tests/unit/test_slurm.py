"""`swiftcp slurm`: the script's text, what is refused, and how the script behaves under SLURM's programs' stand-ins."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from swiftcp.cli import main
from swiftcp.config.slurm import JobConfig, write_script
from tests import slurm_stubs
from tests.unit.config_fixtures import write_model, write_rows

LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A valid one, in a folder whose name needs quoting."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    folder = tmp_path / 'it\'s a $HOME "folder"'
    write_model(folder / "model")
    write_rows(folder / "rows.jsonl")
    (folder / "my recipe.yaml").write_text("model: model\ndataset: rows.jsonl\noutput_dir: out\n", encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder / "my recipe.yaml"


def made(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["slurm", *arguments]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["slurm", *arguments]) == 2
    return capsys.readouterr().err


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")]


def test_the_script_asks_for_what_was_said_and_runs_what_was_checked(recipe, capsys):
    job = ["--nodes", "2", "--gpus-per-node=4", "--time", "1-00:30:00", "--partition", "a100,h200", "--account", "me"]
    script = made(capsys, str(recipe), *job, "--lr", "2e-5", "-cp", "2")
    assert directives(script) == [
        "--job-name=my-recipe",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--time=1-00:30:00",
        "--partition=a100,h200",
        "--account=me",
        "--output=%x-%j.log",
        "--open-mode=append",
        "--signal=B:USR1@120",
        "--exclusive",
        "--mem=0",
        "--requeue",
    ]
    assert "set -euo pipefail" in script and "world 8 = " in script
    assert "sft" in script and "--lr 2e-5 -cp 2 --nproc_per_node=4" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_shared_nodes_and_ranks_on_cpus(recipe, capsys):
    job = ["--nodes", "1", "--gpus_per_node", "2", "--cpus_per_node", "8", "--grace_seconds", "300", "--job_name", "x"]
    script = made(capsys, str(recipe), *job, "--mode", "pt", "--device", "cpu")
    asked = directives(script)
    assert "--cpus-per-task=8" in asked and "--signal=B:USR1@300" in asked and "--job-name=x" in asked
    assert not {"--exclusive", "--mem=0", "--gpus-per-node=2"} & set(asked)
    assert " pt " in script and "--cpus-per-task=8 " in script


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--nodes", "0"], "--nodes 0: set 1 or more"),
        (["--time", "soon"], "--time 'soon' is no time limit"),
        (["--partition", "a b"], "--partition 'a b' is no name"),
        (["--account", "x\n#SBATCH --uid=0"], "is no name for SLURM"),
        (["-cp", "3"], "world 8 is no multiple of context_parallel_size 3"),
        (["--learning_rte", "1"], "did you mean 'lr'"),
        (["--nproc_per_node", "2"], "nproc_per_node 2 [command line: --nproc_per_node] is not --gpus_per_node 4"),
    ],
)
def test_what_does_not_fit_is_refused(recipe, capsys, more, part):
    base = [] if "--nodes" in more else ["--nodes", "2"]
    assert part in refused(capsys, str(recipe), "--gpus_per_node", "4", *base, *more)


def test_a_recipe_that_does_not_exist_is_refused(recipe, capsys):
    assert "did you mean" in refused(capsys, "my recipe.yml", "--nodes", "1", "--gpus_per_node", "1")


def test_the_script_is_written_and_submitted(recipe, capfd, tmp_path, monkeypatch):
    job = [str(recipe), "--nodes", "2", "--gpus_per_node", "1"]
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert main(["slurm", *job, "--submit"]) == 2 and "sbatch, which is not on PATH" in capfd.readouterr().err
    environment = slurm_stubs.install(tmp_path / "bin", os.environ, num_nodes=2)
    monkeypatch.setenv("PATH", environment["PATH"])
    assert main(["slurm", *job, "--submit", "--output", str(tmp_path / "job.sh")]) == 0
    assert capfd.readouterr().out == "Submitted batch job 4242\n"
    assert (tmp_path / "bin" / "submitted.sh").read_text() == (tmp_path / "job.sh").read_text()


TASK = """
import os, pathlib, signal, sys
os.chdir(sys.argv[1])
rank = os.environ["SLURM_PROCID"]
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
pathlib.Path(f"task{rank}").write_text(f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} {sys.argv[2]}")
while sys.argv[2] == "wait":
    signal.pause()
sys.exit(int(sys.argv[2]))
"""


def run_script(tmp_path: Path, word: str, *signums: int) -> tuple[int, str, list[str]]:
    """Run a script whose two tasks end with `word`, or wait for a signal. Returns exit code, output, and what scontrol was told."""
    (tmp_path / "task.py").write_text(TASK)
    command = [sys.executable, str(tmp_path / "task.py"), str(tmp_path), word]
    script = write_script(JobConfig(2, 1), Path("r.yaml"), command, "world 2", folder=tmp_path, on_cpu=True, preempted=75)
    if not (tmp_path / "bin").exists():
        slurm_stubs.install(tmp_path / "bin", os.environ, num_nodes=2)
    environment = {**os.environ, "SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "localhost,localhost"}
    job = slurm_stubs.start(script, environment | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}, tmp_path)
    assert job.stdout is not None
    started = job.stdout.readline() if signums else ""
    while signums and not all((tmp_path / f"task{rank}").exists() for rank in range(2)):
        assert job.poll() is None
    for signum in signums:
        job.send_signal(signum)
    output, _ = job.communicate(timeout=60)
    log = tmp_path / "bin" / "scontrol.log"
    return job.returncode, started + output, log.read_text().splitlines() if log.exists() else []


@pytest.mark.parametrize("code", [0, 1, 2, 137])
def test_the_exit_code_is_that_of_the_run(tmp_path, code):
    returned, output, requeued = run_script(tmp_path, str(code))
    assert (returned, requeued) == (code, []), output
    assert (tmp_path / "task1").read_text() == f"localhost:16242 {code}"


def test_row_9_usr1_saves_and_queues_the_job_again_once(tmp_path):
    returned, output, requeued = run_script(tmp_path, "wait", signal.SIGUSR1)
    assert (returned, requeued) == (75, ["requeue 4242"]), output
    assert "job 4242 is queued again" in output


def test_row_9_without_a_requeue_the_message_says_what_to_do(tmp_path):
    slurm_stubs.install(tmp_path / "bin", os.environ, num_nodes=2)
    (tmp_path / "bin" / "no-requeue").touch()
    returned, output, requeued = run_script(tmp_path, "75")
    assert (returned, requeued) == (75, ["requeue 4242"])
    assert "'scontrol requeue 4242' failed: submit this script again" in output


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(tmp_path):
    returned, output, requeued = run_script(tmp_path, "wait", signal.SIGTERM)
    assert (returned, requeued) == (75, []), output


def test_the_documents_show_the_script():
    job = JobConfig(2, 8, time="12:00:00", partition="gpu")
    command = ["/home/me/venv/bin/python", "-P", "-m", "swiftcp", "sft", "/home/me/project/train.yaml", "--nproc_per_node=8"]
    layout = "world 16 = tp 2 x cp 4 x dp 2"
    script = write_script(job, Path("train.yaml"), command, layout, folder=Path("/home/me/project"), on_cpu=False, preempted=75)
    document = (Path(__file__).parents[2] / "docs" / "launching.md").read_text(encoding="utf-8")
    assert f"```sh\n{script}```" in document
