"""SLURM's programs, as far as job scripts use them, on this machine: srun's tasks are processes here, on the loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_SRUN = """
import os, signal, subprocess, sys
options = [word for word in sys.argv[1:] if word.startswith("--")]
first = next(i for i, word in enumerate(sys.argv[1:], 1) if not word.startswith("--"))
tasks = int(next(word for word in options if word.startswith("--ntasks=")).partition("=")[2])
step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": str(tasks), "SLURM_STEP_NUM_TASKS": str(tasks), "SLURM_STEP_NUM_NODES": str(tasks)}
ranks = [{"SLURM_PROCID": str(i), "SLURM_NODEID": str(i), "SLURM_LOCALID": "0"} for i in range(tasks)]
processes = [subprocess.Popen(sys.argv[first:], env=os.environ | step | rank) for rank in ranks]
for signum in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(signum, lambda number, _: [process.send_signal(number) for process in processes])
print("srun: started", *options, flush=True)
sys.exit(max(code if code >= 0 else 128 - code for code in (process.wait() for process in processes)))
"""
_SCONTROL = """
import pathlib, sys
if sys.argv[1:3] == ["show", "hostnames"]:
    print("localhost\\nlocalhost")
else:
    with (pathlib.Path(__file__).parent / "scontrol.log").open("a") as log:
        log.write(" ".join(sys.argv[1:]) + "\\n")
    sys.exit((pathlib.Path(__file__).parent / "no-requeue").exists())
"""
_SBATCH = """
import pathlib, sys
(pathlib.Path(__file__).parent / "submitted.sh").write_text(sys.stdin.read())
print("Submitted batch job 4242")
"""


def install(folder: Path, environment: Mapping[str, str], *, num_nodes: int) -> dict[str, str]:
    """Write the programs; returns the environment of a batch script that finds them first."""
    folder.mkdir(parents=True)
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL), ("sbatch", _SBATCH)):
        (folder / name).write_text(f"#!{sys.executable}\n{text}")
        (folder / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "localhost,localhost", "SLURM_NNODES": str(num_nodes), "SLURM_CPUS_ON_NODE": "2"}
    return {**environment, **job, "PATH": os.pathsep.join([str(folder), environment["PATH"]])}


def start(script: str, environment: Mapping[str, str], folder: Path) -> subprocess.Popen[str]:
    """Run a job script as slurmd does: bash, from a copy."""
    copy = folder / "slurm_script"
    copy.write_text(script)
    return subprocess.Popen(
        ["bash", str(copy)], env=dict(environment), cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
