"""Where the time of a training step goes, by marks on the device's own clock.

Each mark names the part that ends there. Marks are set by hooks around the tower, the decoder and the model, forward, and by hooks
on the gradients between them, backward; nothing waits for the device, so the step is as fast as without.
"""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

PARTS = ("inputs", "tower", "decoder", "loss", "optimizer")
"""inputs: gradients set to zero, the micro-batch planned and sent; tower, decoder (embedding and merging included) and loss (head
included): forward and backward; optimizer: reduction of gradients and the update."""


class PartTimer:
    """Marks of the steps between `start()` and `seconds()`."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[tuple[str, Any]] = []

    def mark(self, part: str) -> None:
        """The part that was under way ends here."""
        if not self._on_cuda:
            self._marks.append((part, perf_counter()))
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((part, event))

    def start(self) -> None:
        self._marks.clear()
        self.mark("start")

    def seconds(self) -> dict[str, float]:
        """By part, of all steps since `start()` together; waits for the device."""
        if self._on_cuda:
            torch.cuda.synchronize()
        totals: dict[str, float] = defaultdict(float)
        for (_, before), (part, here) in zip(self._marks, self._marks[1:], strict=False):
            totals[part] += before.elapsed_time(here) / 1000 if self._on_cuda else here - before
        return {part: totals[part] for part in PARTS}

    def attach(self, model: Any) -> None:
        """Set marks in every step of a `MultimodalGPTModel`, or of a chunk of it, from now on. What a pipeline stage waits for another
        counts to the part that follows."""
        decoder: nn.Module = model.language_model.decoder
        model.register_forward_pre_hook(self._marker("inputs"))
        for tower in model.towers.values():
            tower.register_forward_pre_hook(self._marker("decoder"))
            tower.register_forward_hook(self._marker("tower"))
        decoder.register_forward_pre_hook(self._before_decoder, with_kwargs=True)
        decoder.register_forward_hook(self._behind_decoder)
        model.register_forward_hook(self._marker("loss"))

    def _marker(self, part: str) -> Any:
        return lambda *_: self.mark(part)

    def _before_decoder(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden: Tensor | None = named["hidden_states"]
        if hidden is not None and hidden.requires_grad:
            hidden.register_hook(self._behind_decoder_backward)

    def _behind_decoder(self, _: nn.Module, arguments: tuple[Any, ...], hidden: Tensor) -> None:
        self.mark("decoder")
        if hidden.requires_grad:
            hidden.register_hook(lambda _: self.mark("loss"))

    def _behind_decoder_backward(self, _: Tensor) -> None:
        self.mark("decoder")
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: self.mark("tower"))
