"""`swiftcp slurm`: what a job script is made from. Invariant: whatever stands in a value, the script says it to sbatch and bash as data."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swiftcp.errors import raise_config_errors

FIRST_PORT, NUM_PORTS = 12000, 20000
"""Ports of SLURM jobs, by the job's number: below those that systems hand out."""

_TIME = re.compile(r"\d+(:\d{1,2}(:\d{1,2})?)?|\d+-\d{1,2}(:\d{1,2}(:\d{1,2})?)?")
_NAME = re.compile(r"[\w.,+@-]+", re.ASCII)


@dataclass(frozen=True)
class JobConfig:
    """What is asked of SLURM."""

    nodes: int
    gpus_per_node: int
    """Ranks of a node: one a GPU."""
    time: str | None = None
    """Limit, as sbatch reads it: minutes, H:MM:SS or D-HH."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    job_name: str | None = None
    """None: the recipe's name."""
    cpus_per_node: int | None = None
    """None: whole nodes, with all their cores and memory."""
    grace_seconds: int = 120
    """Seconds before the limit at which the run saves and is put back into the queue."""

    def check(self) -> None:
        """Raises: ConfigError: values that sbatch would not read as they are meant; all of them in one error."""
        problems = []
        for name in ("nodes", "gpus_per_node", "cpus_per_node", "grace_seconds"):
            if (number := getattr(self, name)) is not None and number < 1:
                problems.append(f"command line: --{name} {number}: set 1 or more")
        if self.time is not None and not _TIME.fullmatch(self.time):
            problems.append(f"command line: --time '{self.time}' is no time limit: write minutes, H:MM:SS or D-HH:MM:SS")
        for name in ("partition", "account", "qos", "job_name"):
            if (text := getattr(self, name)) is not None and not _NAME.fullmatch(text):
                problems.append(f"command line: --{name} '{text}' is no name for SLURM: use letters, digits and . , _ + @ - alone")
        raise_config_errors(problems)


def _directives(job: JobConfig, name: str, on_cpu: bool) -> list[str]:
    wanted = {
        "job-name": name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": None if on_cpu else job.gpus_per_node,
        "cpus-per-task": job.cpus_per_node,
        "time": job.time,
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "output": "%x-%j.log",
        "open-mode": "append",
        "signal": f"B:USR1@{job.grace_seconds}",
    }
    whole_nodes = [] if job.cpus_per_node else ["--exclusive", "--mem=0"]
    lines = [f"--{key}={value}" for key, value in wanted.items() if value is not None]
    return [f"#SBATCH {line}" for line in [*lines, *whole_nodes, "--requeue"]]


_SCRIPT = """\
#!/usr/bin/env bash
# {title}
#
# {layout}
# One task a node: it starts the node's ranks and looks after them. Every rank then sees all GPUs of its node, which reach each other
# directly (under --gpus-per-task they could not), and where one dies, the rank is named and its node's others are ended.
{directives}

set -euo pipefail
cd {folder}

# Where ranks meet: the first node, and a port that follows from the job's number.
hosts="$(scontrol show hostnames "$SLURM_JOB_NODELIST")"
export MASTER_ADDR="${{hosts%%$'\\n'*}}"
export MASTER_PORT="$(({first_port} + SLURM_JOB_ID % {num_ports}))"

# SLURM signals this script (--signal=B:USR1@{grace_seconds}) before the time limit and, where so configured, before a preemption.
# srun hands the signal on to its tasks: all ranks save a checkpoint at the end of their step, and end with exit code {preempted}.
# SIGTERM alone is scancel, or a preemption behind which SLURM queues the job itself: the run saves too, but is not queued here.
srun_pid=""
asked=""
stop() {{
  asked="${{asked:-$1}}"
  echo "slurm script: asked to stop by $1: the run saves a checkpoint" >&2
  if [[ -n "$srun_pid" ]]; then kill -USR1 "$srun_pid" 2>/dev/null || true; fi
}}
trap 'stop USR1' USR1
trap 'stop TERM' TERM

# Nodes end together; --wait ends those that do not, for another node is gone.
srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 {cpus} --kill-on-bad-exit=0 --wait=300 \\
  {command} &
srun_pid="$!"
if [[ -n "$asked" ]]; then kill -USR1 "$srun_pid"; fi  # asked in the instant before

# A signal interrupts wait; the last one gives srun's exit code.
while true; do
  code=0
  wait "$srun_pid" || code="$?"
  kill -0 "$srun_pid" 2>/dev/null || break
done

if [[ "$code" -eq {preempted} && "$asked" != TERM ]]; then
  if scontrol requeue "$SLURM_JOB_ID"; then
    echo "slurm script: a checkpoint is saved, and job $SLURM_JOB_ID is queued again" >&2
  else
    echo "slurm script: a checkpoint is saved, but 'scontrol requeue $SLURM_JOB_ID' failed: submit this script again to go on" >&2
  fi
fi
exit "$code"
"""


def write_script(job: JobConfig, recipe: Path, command: Sequence[str], layout: str, *, folder: Path, on_cpu: bool, preempted: int) -> str:
    """The job script.

    Args:
        recipe: names the job.
        command: what each node runs, word by word.
        layout: the line that says how ranks are laid out.
        folder: where the job runs; relative paths of the recipe begin there.
        preempted: exit code of a run that saved and stopped.
    """
    name = job.job_name or re.sub(r"[^\w.+-]", "-", recipe.stem, flags=re.ASCII)
    title = f"{recipe.name} on {job.nodes} x {job.gpus_per_node} {'ranks' if on_cpu else 'GPUs'}".replace("\n", " ")
    return _SCRIPT.format(
        title=title,
        layout=layout,
        directives="\n".join(_directives(job, name, on_cpu)),
        folder=shlex.quote(str(folder)),
        first_port=FIRST_PORT,
        num_ports=NUM_PORTS,
        grace_seconds=job.grace_seconds,
        preempted=preempted,
        nodes=job.nodes,
        cpus=f"--cpus-per-task={job.cpus_per_node or '"${SLURM_CPUS_ON_NODE:-1}"'}",
        command=" ".join(shlex.quote(word) for word in command),
    )
