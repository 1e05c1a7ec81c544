"""What megatron-core 0.19 needs in a rank process that has no CUDA device.

megatron-core names CUDA where a CPU would do: the current device and stream, random states, literal `device="cuda"` in its
schedules, type strings in its optimizer. Rank processes call `install()` once, before anything is built, and build, step and
save inside `cpu_mode()`. Nothing here runs at import, and nothing runs where torch finds a CUDA device.

All replacements were found and are valid for megatron-core 0.19.2; each function says what it replaces.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Replace the CUDA entry points that megatron-core calls. Does nothing where there is a CUDA device, or the second time."""
    global _installed
    if _installed or torch.cuda.is_available():
        return
    _installed = True
    _replace_device()
    _replace_streams()
    _replace_random_states()
    _replace_copies_to_host()
    _replace_uneven_collectives()


def _replace_device() -> None:
    """`torch.cuda.current_device` is only ever used as `device=...`; `synchronize` has nothing to wait for."""
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *args, **kwargs: None  # type: ignore[assignment]


class _NoStream:
    """A CUDA stream or event where everything is synchronous already. A type, for annotations of other packages name it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def record_event(self, *args: Any, **kwargs: Any) -> _NoStream:
        return self

    def __enter__(self) -> _NoStream:
        return self

    def __exit__(self, *args: object) -> None:
        pass


def _replace_streams() -> None:
    """`torch.cuda.current_stream`, `Stream`, `stream`: DDP and the optimizer order their work with them."""
    stream = _NoStream()
    torch.cuda.current_stream = lambda *args, **kwargs: stream  # type: ignore[assignment,return-value]
    torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]
    torch.cuda.stream = lambda *args, **kwargs: stream  # type: ignore[assignment,return-value]


def _replace_random_states() -> None:
    """The random-state tracker and recomputation keep "the CUDA generator": it becomes the CPU's."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: object = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: object = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    # Where both generators are one, drawing from a named state changes "the other" one too, for as long as the state is set.
    random_log = logging.getLogger(megatron_random.__name__)
    random_log.addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    torch.cuda.get_rng_state = get_state  # type: ignore[assignment]
    torch.cuda.manual_seed = manual_seed


def _replace_copies_to_host() -> None:
    """The dispatcher of tokens to experts counts on the device, and turns counts into numpy on their way to the host, if they go."""
    from megatron.core.transformer.moe import token_dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = on_host


def _replace_uneven_collectives() -> None:
    """Experts that are cut get unequal numbers of tokens from the ranks that share them, and gloo gathers equal numbers alone: pad."""
    from megatron.core.tensor_parallel import mappings

    gather, reduce_scatter = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    def padded(part: torch.Tensor, length: int) -> torch.Tensor:
        return torch.cat([part, part.new_zeros(length - len(part), *part.shape[1:])])

    def gather_uneven(whole: torch.Tensor, group: Any, sizes: list[int] | None = None, *rest: Any) -> torch.Tensor:
        if sizes is None:
            return gather(whole, group, None, *rest)
        parts = gather(padded(whole, max(sizes)), group).chunk(len(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def reduce_scatter_uneven(whole: torch.Tensor, group: Any, sizes: list[int] | None = None, *rest: Any) -> torch.Tensor:
        if sizes is None:
            return reduce_scatter(whole, group, None, *rest)
        parts = torch.cat([padded(part, max(sizes)) for part in whole.split(sizes)])
        return reduce_scatter(parts, group)[: sizes[group.rank()]]

    mappings._gather_along_first_dim = gather_uneven
    mappings._reduce_scatter_along_first_dim = reduce_scatter_uneven


def _to_cpu(device: Any) -> Any:
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    return "cpu" if isinstance(device, str) and device.startswith("cuda") else device


class _CudaLiteralsToCpu(TorchFunctionMode):
    """Literal CUDA devices become the CPU, and type strings answer as CUDA's (the optimizer sorts gradients by them)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _to_cpu(kwargs["device"])}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _to_cpu(args[1]), *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


@contextlib.contextmanager
def cpu_mode() -> Iterator[None]:
    """Inside, megatron-core's literal CUDA devices mean the CPU. Does nothing where `install()` did nothing."""
    if not _installed:
        yield
        return
    with _CudaLiteralsToCpu():
        yield
