"""What a run says of itself in its output folder: `run_config.yaml`, `env.json`, `command.txt`. Secrets are masked."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from swiftcp.checkpoint.durable import write_text
from swiftcp.config.resolved import ResolvedConfig
from swiftcp.config.secrets import mask
from swiftcp.parallel.mesh import Mesh

_PACKAGES = ("swiftcp", "torch", "megatron-core", "transformers", "transformer-engine", "numpy", "av", "pillow")
_VARIABLES = ("CUDA_", "MASTER_", "NCCL_", "NNODES", "NODE_RANK", "NPROC_", "NVTE_", "OMP_", "SLURM_", "SWIFTCP_", "TORCH_", "WORLD_SIZE")
"""Beginnings of the names of the environment variables that are written down: what a launcher or a library is told."""


def versions_of(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def environment(mesh: Mesh) -> dict[str, Any]:
    """Versions, machine, layout, and the variables that launchers and libraries read."""
    on_cuda = mesh.device.type == "cuda"
    return {
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "layout": mesh.describe(),
        "device": torch.cuda.get_device_name(mesh.device) if on_cuda else platform.machine(),
        "cuda": torch.version.cuda if on_cuda else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions_of(_PACKAGES),
        "variables": {
            name: mask(f"{name}={value}").partition("=")[2] for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)
        },
    }


def write_run_files(output_dir: Path, resolved: ResolvedConfig[Any], mesh: Mesh) -> None:
    """Called on the first rank; replaces what an earlier start wrote."""
    output_dir.mkdir(parents=True, exist_ok=True)
    write_text(output_dir / "run_config.yaml", resolved.to_yaml())
    write_text(output_dir / "env.json", json.dumps(environment(mesh), indent=2) + "\n")
    write_text(output_dir / "command.txt", mask(shlex.join(["swiftcp", *sys.argv[1:]])) + "\n")
