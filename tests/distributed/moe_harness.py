"""The router losses of the tiny Qwen3-VL-MoE: a naive loop over the logits of `transformers`, and what training adds to gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.distributed.layout_harness import of_all_ranks
from tests.distributed.training_harness import Pack, Training, train_config
from tests.samples import make_sample


def naive_router_losses(logits_TE: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """(load balancing: E x sum over experts of share of choices x mean probability; z: mean squared log-sum-exp) of one layer."""
    num_tokens, num_experts = logits_TE.shape
    chosen = logits_TE.topk(topk).indices.flatten().tolist()
    probabilities = logits_TE.exp() / logits_TE.exp().sum(-1, keepdim=True)
    balance = torch.zeros(())
    for expert in range(num_experts):
        balance = balance + num_experts * (chosen.count(expert) / (num_tokens * topk)) * probabilities[:, expert].mean()
    return balance, logits_TE.exp().sum(-1).log().square().mean()


def reference(folder: Path, packs: Sequence[Pack], coefficients: tuple[float, float]) -> tuple[dict[str, Tensor], tuple[float, ...]]:
    """(gradients of the mean over micro-batches of the weighted losses, summed over layers; the losses' means over both)."""
    from swiftcp.models.registry import family_of
    from swiftcp.trainers.oracle import load_oracle
    from swiftcp.trainers.setup import load_source

    source = load_source(folder)
    model = load_oracle(folder, family_of("qwen3_vl_moe"), dtype=torch.float32, device=torch.device("cpu"))
    routers = [layer.mlp.gate for layer in model.model.language_model.layers if hasattr(layer.mlp, "gate")]
    seen: list[list[Tensor]] = [[] for _ in routers]
    for router, logits in zip(routers, seen, strict=True):
        router.register_forward_hook(lambda module, inputs, outputs, logits=logits: logits.append(outputs[0]))
    means = [0.0, 0.0]
    for number, pack in enumerate(packs):
        for logits in seen:
            logits.clear()
        for i, mix in enumerate(pack.mixes):
            _forward(model, make_sample(mix, source.hf_config, row=100 * number + i))
        layers = [naive_router_losses(torch.cat(logits), source.hf_config.text_config.num_experts_per_tok) for logits in seen]
        total = sum(coefficients[0] * balance + coefficients[1] * z for balance, z in layers)
        torch.as_tensor(total / len(packs)).backward()
        for kind in range(2):
            means[kind] += sum(losses[kind].item() for losses in layers) / len(layers) / len(packs)
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
    return gradients, tuple(means)


def _forward(model: Any, sample: Any) -> None:
    from swiftcp.trainers.oracle import oracle_logprobs

    oracle_logprobs(model, sample)


def gradients_of_batches(
    folder: Path, keys: dict[str, Any], batches: Sequence[Sequence[Pack]]
) -> list[tuple[dict[str, Tensor], tuple[float, ...] | None]]:
    """On one rank: of each global batch the gradients by the checkpoint's names, and the router losses of its log."""
    from swiftcp.parallel.cpu_shim import cpu_mode
    from swiftcp.trainers.step import run_micro_batches

    found = []
    with cpu_mode():
        training = Training(train_config(folder, **keys))
        for packs in batches:
            for chunk in training.wrapped:
                chunk.zero_grad_buffer()
            totals = run_micro_batches(training.runner, training.share(packs), len(packs))
            found.append((of_all_ranks(training, lambda parameter: parameter.main_grad.clone()), totals.router_losses))
    return found


def export_untrained(folder: Path, output: Path, keys: dict[str, Any]) -> None:
    """On each rank of a layout: read the weights, and write them again."""
    from swiftcp.checkpoint.hf_writer import export_hf_folder
    from swiftcp.parallel.cpu_shim import cpu_mode

    with cpu_mode():
        training = Training(train_config(folder, **keys))
        table = training.source.family.name_table(training.source.hf_config)
        export_hf_folder(training.chunks, folder, output, table, training.mesh.place, max_shard_bytes=200_000)
