"""Work in other processes, with results in the order in which the work was given.

Workers come from a fork server that has imported what they need: forking this process would copy its threads' locks and its CUDA
context, and spawning would import transformers once a worker.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader


def map_in_order[T, R](work: Callable[[T], R], items: Iterable[T], *, num_workers: int, prefetch_factor: int = 2) -> Iterator[R]:
    """`work` of each item, in order; `prefetch_factor` items a worker ahead of the reader, none with 0 workers.

    With workers, `work` and the items must be picklable. An exception of `work` is raised here as it was there.
    """
    if not num_workers:
        yield from map(work, items)
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_preloaded())
    loader: DataLoader[Any] = DataLoader(
        _Items(work),  # type: ignore[arg-type]
        sampler=items,
        batch_size=None,
        num_workers=num_workers,
        prefetch_factor=prefetch_factor,
        collate_fn=_unchanged,
        multiprocessing_context=context,
        worker_init_fn=_outlive_first_sigterm,
    )
    for result in loader:
        if isinstance(result, _Raised):
            raise result.error
        yield result


def _preloaded() -> list[str]:
    """What takes seconds to import: this package's readers, and the processors that this process has loaded."""
    processors = [name for name in sys.modules if name.startswith("transformers.models.") and "process" in name.rpartition(".")[2]]
    return ["swiftcp.data.fork_server", "swiftcp.data.loader", *sorted(processors)]


def _outlive_first_sigterm(worker: int) -> None:
    """Schedulers send SIGTERM to every process of a job, but a rank that saves and ends needs its workers up to the end of its step.

    The second SIGTERM ends the worker: Python sends two where a process ends before its workers.
    """
    signal.signal(signal.SIGTERM, lambda signum, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))


class _Items:
    """A data set whose indices are the items of work themselves."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work

    def __getitem__(self, item: Any) -> Any:
        try:
            return self._work(item)
        except Exception as error:  # handed over: DataLoader would wrap it in another with a traceback as its message
            return _Raised(error)


class _Raised:
    def __init__(self, error: Exception) -> None:
        self.error = error


def _unchanged(result: Any) -> Any:
    return result
