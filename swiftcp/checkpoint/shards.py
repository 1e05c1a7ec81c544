"""Weights and optimizer as megatron-core's distributed checkpoint: shards by names and places that no layout changes.

A write has three parts. The plan is made by all ranks together and takes copies, so that what follows may overlap with training;
the writing is each rank's own, in any thread; and all ranks complete it together. megatron-core would fork a process to write
(unsafe beside threads and CUDA) or hand tensors to one through CUDA's interprocess memory: a thread needs neither, on any device.
"""

from __future__ import annotations

import queue
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

from swiftcp.checkpoint.hf_reader import unwrap
from swiftcp.checkpoint.optimizer_parts import in_as_many_parts
from swiftcp.checkpoint.safe_pickle import check_pickles
from swiftcp.checkpoint.together import is_first_rank, rank_and_size, together
from swiftcp.errors import CheckpointError
from swiftcp.parallel.cpu_shim import cpu_mode

_CONTENTS_FILES = (".metadata", "metadata.json")


class ShardWrite:
    """The write of one checkpoint's shards. Making one is the plan; then come `write` and, on all ranks, `complete`."""

    def __init__(
        self,
        folder: Path,
        model_chunks: Sequence[nn.Module],
        optimizer: MegatronOptimizer | None,
        dp_cp_group: dist.ProcessGroup,
        *,
        copies: bool,
    ) -> None:
        """Called on all ranks, which share out what several of them hold.

        Args:
            optimizer: None to leave its state out.
            copies: values change before `write` is through.
        Raises:
            CheckpointError: megatron-core failed on all ranks. Where it fails on one rank alone the others wait for it inside: that rank
                ends, and the launcher the others with it.
        """
        self.folder = folder
        _keep_results_in_this_process()
        strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), dp_cp_group)
        with cpu_mode(), _as_checkpoint_error(folder):
            state = _sharded_state(model_chunks, optimizer, dp_cp_group, is_loading=False)
            self._request = dist_checkpointing.save(state, str(folder), strategy, async_sharded_save=True, async_strategy="mcore")
            self._buckets = _to_host(self._request.preload_fn() if self._request.preload_fn else [], copies)

    def write(self) -> list[Path]:
        """Write this rank's shards; in any thread. Returns its files.

        Errors of the disk are kept for `complete`, which tells all ranks of them.
        """
        if self._request.async_fn is not None:
            rank, _, results = self._request.async_fn_args
            self._request.async_fn(rank, self._buckets, results)
        self._buckets = []
        rank, _ = rank_and_size()
        return list(self.folder.glob(f"__{rank}_*.distcp"))

    def complete(self) -> list[Path]:
        """Write the table of contents. Called on all ranks when all have written. Returns the files of this rank.

        Raises:
            CheckpointError: some rank could not write.
        """
        with cpu_mode(), _as_checkpoint_error(self.folder):
            for complete in self._request.finalize_fns:
                complete()
        return [self.folder / name for name in _CONTENTS_FILES] if is_first_rank() else []


def read_shards(
    checkpoint: Path, model_chunks: Sequence[nn.Module], optimizer: MegatronOptimizer | None, dp_cp_group: dist.ProcessGroup
) -> dict[str, Any]:
    """Fill the model; returns all that was read. Called on all ranks.

    Args:
        optimizer: None to leave its state out.
    Raises:
        CheckpointError: the checkpoint is damaged, holds something else than data, or is of another model.
    """
    with together("reading a checkpoint"), cpu_mode():
        check_pickles(checkpoint)
        wanted = _sharded_state(model_chunks, optimizer, dp_cp_group, is_loading=True)
        try:
            loaded = dist_checkpointing.load(wanted, str(checkpoint), validate_access_integrity=False)
        except (CheckpointException, CheckpointingException, OSError, KeyError, ValueError) as error:
            what = "this model and its optimizer" if optimizer else "this model"
            raise CheckpointError(f"{checkpoint} does not hold {what}: {error}") from error
        for name, chunk in zip(_chunk_names(model_chunks), model_chunks, strict=True):
            _fill(unwrap(chunk), loaded[name], checkpoint)
        if optimizer is not None:
            saved = dist_checkpointing.load_common_state_dict(str(checkpoint))["optimizer"]
            loaded["optimizer"] = in_as_many_parts(loaded["optimizer"], saved, optimizer)
    return loaded


def _fill(chunk: nn.Module, state: dict[str, Any], checkpoint: Path) -> None:
    """All but what is frozen beside adapters must be there.

    Raises:
        CheckpointError: it is not, or there is more.
    """
    missing, unexpected = chunk.load_state_dict(state, strict=False)
    parameters = dict(chunk.named_parameters())
    lacking = [name for name in missing if name not in parameters or parameters[name].requires_grad]
    if lacking or unexpected:
        raise CheckpointError(f"{checkpoint} does not hold this model: {[*lacking, *unexpected][:10]}")


def _sharded_state(
    model_chunks: Sequence[nn.Module], optimizer: MegatronOptimizer | None, dp_cp_group: dist.ProcessGroup, is_loading: bool
) -> dict[str, Any]:
    """The run's tensors as parts of whole ones, by names that no layout changes."""
    metadata: dict[str, Any] = {
        "dp_cp_group": dp_cp_group,
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }
    if unwrap(model_chunks[0]).config.linear_attention_freq is not None:  # type: ignore[union-attr]
        metadata["non_homogeneous_layers"] = True  # delta nets and attention have other parameters
    names = _chunk_names(model_chunks)
    state: dict[str, Any] = {
        name: unwrap(chunk).sharded_state_dict(metadata=metadata)  # type: ignore[operator]
        for name, chunk in zip(names, model_chunks, strict=True)
    }
    if optimizer is not None:
        model_state = state[names[0]] if len(names) == 1 else dict(state)
        state["optimizer"] = optimizer.sharded_state_dict(model_state, is_loading=is_loading, metadata=metadata)
    return state


def _chunk_names(model_chunks: Sequence[nn.Module]) -> list[str]:
    """megatron-core's own names of model chunks."""
    return ["model"] if len(model_chunks) == 1 else [f"model{number}" for number in range(len(model_chunks))]


def _keep_results_in_this_process() -> None:
    """megatron-core 0.19 hands the writer's results over through a manager process, also where the writer runs in this process.

    Spawning it takes seconds, and runs the user's script a second time where that has no `__main__` guard.
    """
    filesystem_async._results_queue = queue.Queue()


def _to_host(buckets: Sequence[tuple[Any, Any, tuple[Any, list[tuple[Any, Tensor]]]]], copies: bool) -> list[Any]:
    """Files to write, with their tensors on the host.

    megatron-core has copied tensors from the GPU. With one, host tensors were made for this save, and are not copied again; without
    one, they are those that the next step changes.
    """
    if not copies or torch.cuda.is_available():
        return list(buckets)
    return [(file, key, (objects, [(item, value.clone()) for item, value in tensors])) for file, key, (objects, tensors) in buckets]


@contextmanager
def _as_checkpoint_error(folder: Path) -> Iterator[None]:
    """megatron-core hands on the kind of error alone; its log has the reason."""
    try:
        yield
    except (CheckpointException, CheckpointingException, OSError) as error:
        free = shutil.disk_usage(folder).free / 2**30
        raise CheckpointError(f"{folder} could not be written ({free:.1f} GiB are free there): {error}") from error
