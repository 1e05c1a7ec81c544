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


def measure_peft(folder: Path, adapter: Path, packs: Sequence[Pack]) -> Measurement:
    """`peft` on `transformers`, one row at a time; gradients of what the adapter trains, by the checkpoint's names."""
    from peft import PeftModel

    from swiftcp.trainers.oracle import load_oracle, oracle_logprobs
    from swiftcp.trainers.setup import load_source

    source = load_source(folder)
    base = load_oracle(folder, source.family, dtype=torch.float32, device=torch.device("cpu"))
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True).eval()
    logprobs, losses, num_labels = [], torch.zeros(()), 0
    for sample in _samples(packs, source.hf_config):
        of_row, weights = oracle_logprobs(model.base_model.model, sample), sample.weights_L[1:]
        logprobs.append(of_row.detach()[weights > 0])
        losses = losses - (of_row * weights).sum()
        num_labels += int((weights > 0).sum())
    loss = losses / num_labels
    loss.backward()
    gradients = {
        _checkpoint_name(name): torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters() if p.requires_grad
    }
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    return Measurement(loss.item(), norm, gradients, torch.cat(logprobs), router_losses=None)


def transformers_logprobs(folder: Path, packs: Sequence[Pack]) -> Tensor:
    """Of all labelled tokens of all packs, one after the other."""
    from swiftcp.trainers.oracle import load_oracle, oracle_logprobs
    from swiftcp.trainers.setup import load_source

    source = load_source(folder)
    model = load_oracle(folder, source.family, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        rows = [oracle_logprobs(model, sample)[sample.weights_L[1:] > 0] for sample in _samples(packs, source.hf_config)]
    return torch.cat(rows)


def _samples(packs: Sequence[Pack], hf_config: Any) -> list[Any]:
    return [
        make_sample(mix, hf_config, row=100 * number + i, labelled=pack.labelled)
        for number, pack in enumerate(packs)
        for i, mix in enumerate(pack.mixes)
    ]


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


def dropped(folder: Path, keys: dict[str, Any]) -> dict[str, Tensor]:
    """On each rank: what dropout leaves of ones, in a layer whose outputs are cut and in one whose inputs are."""
    from swiftcp.models.lora import adapted
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = Training(train_config(folder, **LORA, **keys, lora_dropout=0.5))
        kinds = {type(layer.adapter).__name__: layer.adapter for layer in adapted(training.chunks)}  # type: ignore[union-attr]
        return {kind: adapter.train().drop(torch.ones(64, 1, 8)) for kind, adapter in kinds.items()}  # type: ignore[operator]


def whole_factors_after_steps(folder: Path, keys: dict[str, Any]) -> dict[str, Tensor]:
    """On each rank: the factors that every tensor-parallel rank has whole, after two steps with dropout."""
    from swiftcp.parallel.cpu_shim import cpu_mode
    from swiftcp.trainers.adapters import trained_parameters
    from tests.distributed.layout_harness import PACKS

    with cpu_mode():
        training = Training(train_config(folder, **{**LORA, **keys, "lora_dropout": 0.3, "lr": 1e-2}))
        for _ in range(2):
            training.step(PACKS)
        trained = trained_parameters(training.chunks)
        return {name: p.detach() for name, p in trained.items() if not getattr(p, "tensor_model_parallel", False)}


def bytes_in_bfloat16(folder: Path, keys: dict[str, Any]) -> dict[str, int]:
    """After a step on one rank: numbers of trained and frozen values, and bytes of weights, gradients, masters and moments."""
    from swiftcp.parallel.cpu_shim import cpu_mode
    from tests.distributed.layout_harness import PACKS

    with cpu_mode():
        training = Training(train_config(folder, **LORA, **keys, torch_dtype="bfloat16"))
        training.step(PACKS)
        parameters = list(training.model.parameters())
        optimizers = getattr(training.optimizer, "chained_optimizers", [training.optimizer])
        masters = [p for one in optimizers for group in one.fp32_from_float16_groups + one.fp32_from_fp32_groups for p in group]
        moments = [value for one in optimizers for state in one.optimizer.state.values() for value in state.values() if value.dim()]
        return {
            "trained": sum(p.numel() for p in parameters if p.requires_grad),
            "frozen": sum(p.numel() for p in parameters if not p.requires_grad),
            "weights": sum(p.nbytes for p in parameters),
            "gradients": sum(buffer.grad_data.nbytes for buffer in training.wrapped[0].buffers),
            "masters": sum(p.nbytes for p in masters),
            "moments": sum(value.nbytes for value in moments),
        }


def saved_parameters(folder: Path, keys: dict[str, Any]) -> set[str]:
    """On each rank: what of its chunks' parameters a resumable checkpoint holds."""
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = Training(train_config(folder, **LORA, **keys))
        metadata = {"dp_cp_group": training.mesh.dp_cp_group}
        names = {name for chunk in training.chunks for name, _ in chunk.named_parameters()}
        return names & {name for chunk in training.chunks for name in chunk.sharded_state_dict(metadata=metadata)}


def read_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
