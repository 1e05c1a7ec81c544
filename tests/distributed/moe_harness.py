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


def routed(hidden_TH: Tensor, weight_EH: Tensor, topk: int, router_dtype: str | None) -> tuple[Tensor, Tensor]:
    """On one rank: (weights of the chosen experts, which are chosen) of our router, both [T, E]."""
    import torch.distributed as dist
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from swiftcp.parallel.cpu_shim import cpu_mode
    from swiftcp.parallel.moe import Router

    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden_TH.size(1),
        num_attention_heads=1,
        num_moe_experts=weight_EH.size(0),
        moe_router_topk=topk,
        moe_router_load_balancing_type="aux_loss",
        moe_router_dtype=router_dtype,
        add_bias_linear=False,
        params_dtype=hidden_TH.dtype,
        perform_initialization=False,
    )
    groups = ProcessGroupCollection(**dict.fromkeys(("tp", "cp", "tp_cp", "tp_dp_cp"), dist.group.WORLD))
    with cpu_mode(), torch.no_grad():
        router = Router(config, pg_collection=groups)
        router.weight.data = weight_EH
        return router(hidden_TH[:, None])


def routed_by_transformers(hidden_TH: Tensor, weight_EH: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """The same of the router of `transformers`."""
    from transformers.models.qwen3_vl_moe.configuration_qwen3_vl_moe import Qwen3VLMoeTextConfig
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextTopKRouter

    sizes = dict(num_experts=weight_EH.size(0), num_experts_per_tok=topk, hidden_size=hidden_TH.size(1))
    router = Qwen3VLMoeTextTopKRouter(Qwen3VLMoeTextConfig(**sizes))
    router.weight.data = weight_EH
    with torch.no_grad():
        logits_TE, weights_TK, experts_TK = router(hidden_TH)
    weights_TE = torch.zeros_like(logits_TE).scatter(1, experts_TK, weights_TK)
    return weights_TE, weights_TE > 0
