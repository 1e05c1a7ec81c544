"""Adapters of the tiny models: random ones, and what PEFT makes of them on the `transformers` model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed.layout_harness import Measurement, measure_packed
from tests.distributed.training_harness import Pack, Training, train_config
from tests.samples import make_sample

LORA = {"tuner_type": "lora", "lora_rank": 3, "lora_alpha": 7}


def write_random_adapter(folder: Path, output: Path, keys: dict[str, Any]) -> tuple[int, int]:
    """On one rank: a new adapter whose second factors are random too, and whole weights that are not the model's.

    Returns:
        Numbers of trained values and of all.
    """
    from swiftcp.parallel.cpu_shim import cpu_mode
    from swiftcp.trainers.adapters import trained_parameters, write_weights

    with cpu_mode():
        training = Training(train_config(folder, **LORA, **keys))
        trained = trained_parameters(training.chunks)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in sorted(trained.items()):
            if not name.endswith("lora_A"):
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        write_weights(training.chunks, training.source, training.mesh, output, merge=False)
        return sum(p.numel() for p in trained.values()), sum(p.numel() for p in training.model.parameters())


def measure_peft(folder: Path, adapter: Path, packs: Sequence[Pack], *, merged: bool = False) -> Measurement:
    """`peft` on `transformers`, one row at a time; gradients of what the adapter trains, by the checkpoint's names."""
    from peft import PeftModel

    from swiftcp.trainers.oracle import load_oracle, oracle_logprobs
    from swiftcp.trainers.setup import load_source

    source = load_source(folder)
    base = load_oracle(folder, source.family, dtype=torch.float32, device=torch.device("cpu"))
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
    if merged:
        model = model.merge_and_unload()
    samples = [
        make_sample(mix, source.hf_config, row=100 * number + i, labelled=pack.labelled)
        for number, pack in enumerate(packs)
        for i, mix in enumerate(pack.mixes)
    ]
    bare = model if merged else model.base_model.model
    logprobs, losses, num_labels = [], torch.zeros(()), 0
    for sample in samples:
        of_row, weights = oracle_logprobs(bare, sample), sample.weights_L[1:]
        logprobs.append(of_row.detach()[weights > 0])
        losses = losses - (of_row * weights).sum()
        num_labels += int((weights > 0).sum())
    loss = losses / num_labels
    loss.backward()
    gradients = {
        _checkpoint_name(name): torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters() if p.requires_grad
    }
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    return Measurement(loss.item(), norm, gradients, torch.cat(logprobs))


def _checkpoint_name(name: str) -> str:
    return name.removeprefix("base_model.model.").replace(".default", "").replace(".modules_to_save", "")


def measure_adapter(folder: Path, adapter: Path, keys: dict[str, Any], packs: Sequence[Pack]) -> Measurement:
    """On each rank of a layout: ours, with the adapter read from its folder."""
    return measure_packed(folder, {**LORA, "adapters": str(adapter), **keys}, packs)


def rewrite(folder: Path, adapter: Path, output: Path, keys: dict[str, Any], merge: bool) -> None:
    """On each rank of a layout: read an adapter and write it again, or the merged model."""
    from swiftcp.parallel.cpu_shim import cpu_mode
    from swiftcp.trainers.adapters import write_weights

    with cpu_mode():
        training = Training(train_config(folder, **{**LORA, "adapters": str(adapter), **keys}))
        write_weights(training.wrapped, training.source, training.mesh, output, merge=merge)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
