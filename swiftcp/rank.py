"""What a process does before it becomes a rank, and so before anything imports torch or megatron-core."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from types import FrameType

from swiftcp.errors import PreemptedError
from swiftcp.parallel.engine import hide_broken_transformer_engine

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What asks a run to save and stop. SLURM sends the second before a time limit, where a script asks for it."""


def _on_stop_signal(signum: int, frame: FrameType | None) -> None:
    """Stands for "nothing to save now": `_end_at_once` acts on it."""


def _end_at_once(pipe: int, first_rank: bool, goes_on: bool) -> None:
    """In a thread, for the main one may be waiting for other ranks, or for a file, where no handler of Python's runs."""
    while signums := os.read(pipe, 64):
        asked = next((signum for signum in signums if signal.getsignal(signum) is _on_stop_signal), None)
        if asked is None:
            continue
        text = "asked to stop outside of the training steps: nothing new to save; start the run again to go on"
        if first_rank:
            print(f"swiftcp: {text if goes_on else f'stopped by {signal.Signals(asked).name}'}", file=sys.stderr, flush=True)
        os._exit(PreemptedError.exit_code if goes_on else 128 + asked)
    os.close(pipe)


@contextlib.contextmanager
def stoppable_at_once(*, first_rank: bool, goes_on: bool = True) -> Iterator[None]:
    """Inside, SIGTERM and SIGUSR1 end this process, while nothing else handles them, and the first rank says so. Only the main thread
    can; elsewhere nothing changes.

    Args:
        goes_on: with the exit code of a run that goes on when it is started again: before the training steps there is nothing to save,
            and behind them all is saved. False: with that of a process which died of the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = {signum: signal.signal(signum, _on_stop_signal) for signum in STOP_SIGNALS}
    before_fd = signal.set_wakeup_fd(writing)
    threading.Thread(target=_end_at_once, args=(reading, first_rank, goes_on), daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before_fd)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        os.close(writing)  # ends the thread


def prepare_rank(device: str) -> None:
    """What a rank process does before anything imports torch or megatron-core."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron-core works on a GPU wherever torch finds one
    hide_broken_transformer_engine()


def set_up_logging(*, informs: bool) -> None:
    """What this project says is shown, of other packages what matters: megatron-core and torch tell much at each start."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("swiftcp").setLevel(logging.INFO if informs else logging.WARNING)
    for name in ("megatron", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"(megatron|torch|transformers)\b")
