"""`swiftcp doctor`: what a bug report needs, as Markdown, with secrets masked; and a self-test of communication between ranks.

The self-test runs `python -m swiftcp.doctor cpu|cuda` once a rank: an all-reduce whose sum is known.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from swiftcp import __version__
from swiftcp.config.secrets import mask
from swiftcp.launch import count_gpus, launch_local

_PACKAGES = (
    "torch",
    "transformers",
    "megatron-core",
    "transformer-engine",
    "flash-attn",
    "flash-linear-attention",
    "torchvision",
    "numpy",
    "datasets",
    "safetensors",
    "pillow",
    "av",
    "qwen-vl-utils",
    "pydantic",
    "typer",
    "ruamel.yaml",
)
_VARIABLES = (
    *("CUDA", "NCCL", "NVTE", "GLOO", "OMP", "PYTORCH", "TORCH", "SLURM"),
    *("MASTER_", "RANK", "WORLD_SIZE", "LOCAL_", "NNODES", "NODE_RANK", "NPROC"),
)
"""Beginnings of the variables that matter to a run."""


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _versions() -> Iterator[str]:
    yield f"| swiftcp | {__version__} |"
    yield f"| Python | {platform.python_version()} ({sys.executable}) |"
    yield f"| system | {platform.platform()} |"
    for package in _PACKAGES:
        yield f"| {package} | {_version(package)} |"


def _ffmpeg() -> str:
    try:
        import av
    except ImportError as error:
        return f"PyAV cannot be imported: {error}"
    libraries = ", ".join(f"{name} {'.'.join(map(str, version))}" for name, version in sorted(av.library_versions.items()))
    return f"through PyAV: {libraries}"


def _devices() -> Iterator[str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"- CPU: {cores} cores, {platform.machine()}"
    try:
        import torch
    except Exception as error:  # a broken installation shows as anything, and is what a report is for
        yield f"- torch cannot be imported: {type(error).__name__}: {error}"
        return
    if not torch.cuda.is_available():
        yield f"- CUDA: torch {torch.__version__} finds no device"
        return
    yield f"- CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}, NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        yield f"- GPU {index}: {device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability {device.major}.{device.minor}"


def _attention() -> str:
    found = importlib.util.find_spec("transformer_engine") is not None
    return "te (Transformer Engine) on CUDA, torch elsewhere" if found else "torch alone (Transformer Engine is not installed)"


def _disk() -> Iterator[str]:
    for folder in (Path.cwd(), Path(tempfile.gettempdir())):
        yield f"- {folder}: {shutil.disk_usage(folder).free / 2**30:.0f} GiB free"


def _environment(environment: Mapping[str, str]) -> Iterator[str]:
    shown = {name: value for name, value in sorted(environment.items()) if name.startswith(_VARIABLES)}
    yield from (f"    {mask(f'{name}={value}')}" for name, value in shown.items())


def _communication() -> tuple[str, bool]:
    """One line about the self-test, and whether it passed."""
    num_gpus = count_gpus(os.environ)
    device, nproc = ("cuda", num_gpus) if num_gpus else ("cpu", 2)
    backend = "NCCL" if num_gpus else "gloo"
    code = launch_local([device], nproc, prefix=(sys.executable, "-P", "-m", "swiftcp.doctor"))
    return f"- {backend}, {nproc} ranks: {'all-reduce is right' if code == 0 else f'failed with exit code {code}'}", code == 0


def report() -> tuple[str, bool]:
    """The report, and whether the self-test passed."""
    communication, healthy = _communication()
    lines = ["| what | version |", "| --- | --- |", *_versions(), "", "Devices", "", *_devices(), "", "Communication", "", communication]
    lines += ["", "Attention backends", "", f"- {_attention()}"]
    lines += ["", "FFmpeg", "", f"- {_ffmpeg()}", "", "Disk", "", *_disk(), "", "Environment", "", *_environment(os.environ)]
    return "\n".join(lines), healthy


def _self_test(device: str) -> int:
    """What each rank of the self-test does. Returns 0 if the sum over ranks is right."""
    import torch
    import torch.distributed as dist

    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    total = torch.tensor([dist.get_rank() + 1.0], device=device)
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    dist.destroy_process_group()
    return int(total.item() != world_size * (world_size + 1) / 2)


if __name__ == "__main__":
    sys.exit(_self_test(sys.argv[1]))
