"""Starts the ranks of this machine and looks after them. Imports no torch.

Invariant: when `launch_local` returns, or its process dies, none of the processes it started is left.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from swiftcp.errors import ConfigError, PreemptedError
from swiftcp.rank import STOP_SIGNALS

SWIFTCP = (sys.executable, "-P", "-m", "swiftcp")
"""Starts the command line. -P: the user's folder does not come before installed packages, as for the `swiftcp` script."""
GRACE_SECONDS = 10.0
"""Time for a rank to end by itself between SIGTERM and SIGKILL."""
END_SECONDS = 300.0
"""Ranks end together: time for the last one, behind the first that ended well."""
LOOPBACK = "127.0.0.1"

_POLL_SECONDS = 0.05
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>


def free_port() -> int:
    """A TCP port of the loopback interface that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return listener.getsockname()[1]


def count_gpus(environment: Mapping[str, str]) -> int:
    """GPUs that torch in a process with this environment may use, without importing it."""
    if metadata.version("torch").endswith("+cpu"):
        return 0
    present = len([device for device in Path("/dev").glob("nvidia*") if device.name[6:].isdigit()])
    if present == 0 and (tool := shutil.which("nvidia-smi")):
        listing = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30, check=False)
        present = sum(line.startswith("GPU ") for line in listing.stdout.splitlines())
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if present == 0 or visible is None:
        return present
    names = [name.strip() for name in visible.split(",")]
    end = next((i for i, name in enumerate(names) if name in ("", "-1")), len(names))
    return end


def _bytecode_folder(environment: Mapping[str, str]) -> dict[str, str]:
    """Where ranks keep compiled modules if they cannot do so beside the sources: without, each start costs a minute."""
    torch = importlib.util.find_spec("torch")
    if torch is None or torch.origin is None or "PYTHONPYCACHEPREFIX" in environment:
        return {}
    if os.access(Path(torch.origin).parent / "__pycache__", os.W_OK) or os.access(Path(torch.origin).parent, os.W_OK):
        return {}
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return {"PYTHONPYCACHEPREFIX": str(cache / "swiftcp" / "bytecode")}


def _python_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Lets ranks find this package where it is a checkout that is not installed."""
    root = Path(__file__).resolve().parent.parent
    if root.name == "site-packages":
        return {}
    inherited = environment.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(root), *([inherited] if inherited else [])])}


def rank_variables(local_rank: int, local_world_size: int, *, node_rank: int = 0, num_nodes: int = 1) -> dict[str, str]:
    """The variables that tell a process which rank it is, without the meeting point; machines have equally many ranks."""
    return {
        "RANK": str(node_rank * local_world_size + local_rank),
        "WORLD_SIZE": str(num_nodes * local_world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "GROUP_RANK": str(node_rank),
    }


def base_environment(environment: Mapping[str, str], local_world_size: int) -> dict[str, str]:
    """What ranks inherit: compiled modules are kept, and the machine's cores are shared."""
    inherited = {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
    num_threads = max(1, (os.cpu_count() or 1) // local_world_size)
    quiet = {"PYTHONWARNINGS": "ignore::UserWarning"}  # megatron-core warns of each package that it would use elsewhere
    return {"OMP_NUM_THREADS": str(num_threads)} | quiet | inherited | _bytecode_folder(environment) | _python_path(environment)


def _die_with_parent() -> Callable[[], None] | None:
    """What a child runs before its program, so that it does not outlive a launcher that was killed. Linux only."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl
    parent = os.getpid()

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


class _Ranks:
    """The started processes, each the leader of a process group, so that its own children can be ended with it."""

    def __init__(self, first_rank: int) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.first_rank = first_rank

    def start(self, command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> None:
        in_child = _die_with_parent()
        for environment in environments:
            self.processes.append(
                subprocess.Popen(command, env=dict(environment), stdin=subprocess.DEVNULL, process_group=0, preexec_fn=in_child)
            )

    def alive(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes if process.poll() is None]

    def ended(self) -> list[int]:
        """Ranks that ended."""
        return [self.first_rank + number for number, process in enumerate(self.processes) if process.poll() is not None]

    def failure(self) -> tuple[int, int] | None:
        """(rank, exit code) of a rank that failed. One that saved a checkpoint and stopped did not: the others do so too.

        Of several, one that was killed: others then fail because it is gone, NCCL's by SIGABRT.
        """
        codes = {self.first_rank + number: process.poll() for number, process in enumerate(self.processes)}
        failed = [(rank, code) for rank, code in codes.items() if code not in (None, 0, PreemptedError.exit_code)]
        killed = [(rank, code) for rank, code in failed if code < 0 and code != -signal.SIGABRT]
        return next(iter([*killed, *failed]), None)

    def preempted(self) -> bool:
        return any(process.returncode == PreemptedError.exit_code for process in self.processes)

    def signal(self, signum: int) -> None:
        for process in self.alive():
            process.send_signal(signum)

    def wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.alive() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def kill(self) -> None:
        """End every process at once, with all that it started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Collects SIGINT and what asks to stop in place of dying of it. Only the main thread can; elsewhere the list stays empty."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    collected = (signal.SIGINT, *STOP_SIGNALS)
    before = {signum: signal.signal(signum, lambda number, _: received.append(number)) for signum in collected}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _exit_code(code: int) -> int:
    """As a shell gives it: 128 + n for a process that died of signal n."""
    return 128 - code if code < 0 else code


def _say(text: str) -> None:
    print(f"swiftcp: {text}", file=sys.stderr, flush=True)


def _reason(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed by SIGKILL (systems do so where memory runs out)"
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _supervise(ranks: _Ranks, received: Sequence[int], grace_seconds: float, end_seconds: float) -> int:
    """Wait for the ranks, pass signals on, and stop all if one fails or does not end with the others. Returns the exit code."""
    num_forwarded = 0
    kill_at = float("inf")
    while ranks.alive() and ranks.failure() is None:
        for signum in received[num_forwarded:]:
            ranks.signal(signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)
            if signum == signal.SIGINT or signum in received[:num_forwarded]:  # the first gives all the time that a checkpoint takes
                kill_at = min(kill_at, time.monotonic() + grace_seconds)
            num_forwarded += 1
        if ranks.ended():
            kill_at = min(kill_at, time.monotonic() + end_seconds)
            end_seconds = float("inf")
        if time.monotonic() > kill_at:
            break
        time.sleep(_POLL_SECONDS)
    failure = ranks.failure()
    if failure is not None:
        _stop_others(ranks, failure, grace_seconds, silent=bool(received))
    if signal.SIGINT in received:
        _say("interrupted: the ranks are stopped")
        return 130
    if failure is not None:
        return _exit_code(failure[1])
    return _end_of_stuck(ranks, received) if ranks.alive() else PreemptedError.exit_code if ranks.preempted() else 0


def _end_of_stuck(ranks: _Ranks, received: Sequence[int]) -> int:
    """The exit code of a run whose last ranks had to be killed, though none failed."""
    ended = ranks.ended()
    stuck = [rank for rank in range(ranks.first_rank, ranks.first_rank + len(ranks.processes)) if rank not in ended]
    names = f"rank {', '.join(map(str, stuck))}"
    if ended:
        _say(f"rank {', '.join(map(str, ended))} ended, but {names} did not: killed. The output before says what was saved")
        return PreemptedError.exit_code if ranks.preempted() else 1
    _say(f"{names} did not stop after {signal.Signals(received[-1]).name}: killed")
    return 128 + received[-1]


def _stop_others(ranks: _Ranks, failure: tuple[int, int], grace_seconds: float, *, silent: bool) -> None:
    rank, code = failure
    if silent and code in (-signal.SIGTERM, -signal.SIGUSR1):
        _say(f"stopped by {signal.Signals(-code).name}")
    elif not silent and code != ConfigError.exit_code and len(ranks.processes) > 1:
        _say(f"rank {rank} {_reason(code)}, the other ranks are stopped")
    ranks.signal(signal.SIGTERM)
    ranks.wait(grace_seconds)


def launch_local(
    arguments: Sequence[str],
    nproc: int,
    env: Mapping[str, str] | None = None,
    *,
    prefix: Sequence[str] = SWIFTCP,
    node_rank: int = 0,
    num_nodes: int = 1,
    master_addr: str = LOOPBACK,
    master_port: int | None = None,
    grace_seconds: float = GRACE_SECONDS,
    end_seconds: float = END_SECONDS,
) -> int:
    """Run `[*prefix, *arguments]` once for each rank of this machine and wait for all.

    If one fails, the others get SIGTERM and, `grace_seconds` later, SIGKILL. SIGINT is passed on; SIGTERM and SIGUSR1 are, as SIGTERM.
    A rank that has not ended `end_seconds` behind the first that did is killed.

    Args:
        nproc: ranks of this machine.
        env: environment to inherit; by default the process's.
        master_port: where ranks meet; by default a free port.
    Returns:
        0, the exit code of the first rank that failed (128 + n if it died of signal n), or 130 if interrupted.
    """
    meeting_point = {"MASTER_ADDR": master_addr, "MASTER_PORT": str(master_port or free_port()), "SWIFTCP_LAUNCHER": "swiftcp"}
    inherited = base_environment(os.environ if env is None else env, nproc) | meeting_point
    environments = [inherited | rank_variables(i, nproc, node_rank=node_rank, num_nodes=num_nodes) for i in range(nproc)]
    ranks = _Ranks(node_rank * nproc)
    with _received_signals() as received:
        try:
            ranks.start([*prefix, *arguments], environments)
            return _supervise(ranks, received, grace_seconds, end_seconds)
        finally:
            ranks.kill()
