"""The random states of one rank: Python's, numpy's, torch's on the host and the device, and megatron-core's by name."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from swiftcp.checkpoint.together import is_first_rank
from swiftcp.parallel.mesh import layout_sizes

logger = logging.getLogger(__name__)

FOLDER = "random_states"
_TRACKED = "megatron."


def _file(checkpoint: Path) -> Path:
    return checkpoint / FOLDER / f"rank-{dist.get_rank():05d}.safetensors"


def save_random_states(checkpoint: Path) -> Path:
    """Write this rank's states; returns the file."""
    version, words, python_gauss = random.getstate()
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors = {"python": torch.tensor(words, dtype=torch.int64), "numpy": torch.from_numpy(np.array(keys).astype(np.int64))}
    tensors["torch"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["cuda"] = torch.cuda.get_rng_state()
    tensors |= {_TRACKED + name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()}
    numpy_rest = [kind, int(position), int(has_gauss), float(gauss)]
    rest = {"python": [version, python_gauss], "numpy": numpy_rest, "layout": layout_sizes()}
    file = _file(checkpoint)
    file.parent.mkdir(exist_ok=True)
    save_file(tensors, file, metadata={"rest": json.dumps(rest)})
    return file


def load_random_states(checkpoint: Path) -> None:
    """Set this rank's states. Under another layout they have no owner, and the seeds of this start stay, with a warning.

    Tensor-parallel ranks draw alike where they have the same values, and data-parallel ranks never do: neither may take the other's.
    """
    file = _file(checkpoint)
    tensors, rest = _read(file) if file.exists() else ({}, {})
    if rest.get("layout") != list(layout_sizes()):
        if is_first_rank():
            logger.warning("the random states of %s are those of another layout: they are seeded afresh", checkpoint)
        return
    version, python_gauss = rest["python"]
    random.setstate((version, tuple(tensors["python"].tolist()), python_gauss))
    kind, position, has_gauss, gauss = rest["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    torch.set_rng_state(tensors["torch"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])
    tracked = {name.removeprefix(_TRACKED): state for name, state in tensors.items() if name.startswith(_TRACKED)}
    get_cuda_rng_tracker().set_states(tracked)


def _read(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    with safe_open(file, framework="pt", device="cpu") as stored:
        return {name: stored.get_tensor(name) for name in stored.keys()}, json.loads(stored.metadata()["rest"])  # noqa: SIM118
