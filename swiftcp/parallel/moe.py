"""Mixture-of-experts layers: megatron-core's, with a router whose auxiliary losses have the strength that the recipe says.

The gradient that training takes is a sum over all ranks and micro-batches, divided by one number of labelled tokens. An auxiliary loss
of a micro-batch must count as coefficient x loss, averaged over the micro-batches, however many tokens are labelled and wherever they
lie. So `Router` attaches it as it is, and what its backward pass begins with (`moe_grad_scale_func`, set for each step) cancels the
division: labelled tokens of the global batch over its micro-batches.
megatron-core (0.19) scales by the number of real tokens in its place, which is right only where every token is labelled.

Legend: T local tokens (S x B), E experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

AUXILIARY_LOSSES = ("load_balancing_loss", "z_loss")


def trains_routers(config: TransformerConfig) -> bool:
    """Whether an auxiliary loss has a coefficient."""
    return bool(config.moe_aux_loss_coeff or config.moe_z_loss_coeff)


class Router(TopKRouter):
    """Softmax over all experts, the k likeliest, their probabilities made to add up to one.

    That is the softmax over the k largest logits, in float32. The auxiliary losses are those of one micro-batch, over all ranks that
    share it; padding takes no part, but is routed.

    Load balancing: Fedus et al. 2021, https://arxiv.org/abs/2101.03961 (1 where experts are used evenly); z-loss: Zoph et al. 2022,
    https://arxiv.org/abs/2202.08906.
    """

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        self.coefficients = config.moe_aux_loss_coeff, config.moe_z_loss_coeff or 0.0
        self.recorded_2: Tensor | None = None
        """This rank's share of the losses of `AUXILIARY_LOSSES`, summed over micro-batches."""

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Args:
            logits: [S, B, E].
            padding_mask: [S, B] bool, True at padding.
        Returns:
            Weights of the chosen experts, 0 elsewhere, and which are chosen; [T, E] both.
        """
        logits_TE = logits.flatten(0, 1)
        weights_TE, chosen_TE = topk_routing_with_score_function(logits_TE, self.topk)
        if trains_routers(self.config) and self.training and torch.is_grad_enabled():
            assert padding_mask is not None
            balance, z = auxiliary_losses(logits_TE, chosen_TE, ~padding_mask.flatten(), self.tp_cp_group)
            losses_2 = torch.stack([balance, z]).detach()
            self.recorded_2 = losses_2 if self.recorded_2 is None else self.recorded_2 + losses_2
            weights_TE = MoEAuxLossAutoScaler.apply(weights_TE, self.coefficients[0] * balance + self.coefficients[1] * z)
        return weights_TE, chosen_TE


def auxiliary_losses(logits_TE: Tensor, chosen_TE: Tensor, real_T: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """This rank's shares of a micro-batch's load-balancing loss and z-loss, float32; the sum over the group is the loss.

    Args:
        chosen_TE: which experts each token goes to.
        real_T: which tokens are no padding.
        group: ranks that share the micro-batch.
    """
    num_experts = logits_TE.size(-1)
    logits_TE = logits_TE.float()
    counts = torch.cat([(chosen_TE & real_T[:, None]).sum(0), real_T.sum().view(1)]).float()
    dist.all_reduce(counts, group=group)
    uses_E, num_real = counts[:-1], counts[-1].clamp(min=1)  # a micro-batch of padding alone has losses of 0
    share_E = uses_E / uses_E.sum().clamp(min=1)
    probability_E = (logits_TE.softmax(-1) * real_T[:, None]).sum(0) / num_real
    balance = num_experts * (share_E * probability_E).sum()
    z = (logits_TE.logsumexp(-1).square() * real_T).sum() / num_real
    return balance, z


def take_auxiliary_losses(chunks: Sequence[nn.Module], device: torch.device) -> Tensor:
    """[2] float64: this rank's shares of the losses of `AUXILIARY_LOSSES`, summed over layers and micro-batches since the last call."""
    total_2 = torch.zeros(len(AUXILIARY_LOSSES), dtype=torch.float64, device=device)
    for router in (module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)):
        if router.recorded_2 is not None:
            total_2 += router.recorded_2
        router.recorded_2 = None
    return total_2


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Whether decoder layer `layer`, counted from 0, has experts; `moe_layer_freq` lists all layers."""
    return config.num_moe_experts is not None and bool(config.moe_layer_freq[layer])  # type: ignore[index]


def moe_spec(config: TransformerConfig, provider: BackendSpecProvider) -> Any:
    """An MoE layer for `TransformerLayerSubmodules(mlp=...)`: experts in one grouped product, or one after the other where the backend
    has none."""
    experts = provider.grouped_mlp_modules(config.moe_grouped_gemm)
    shared = None
    if config.moe_shared_expert_intermediate_size is not None:
        layers = MLPSubmodules(
            linear_fc1=provider.column_parallel_linear(), linear_fc2=provider.row_parallel_linear(), activation_func=None
        )
        shared = partial(SharedExpertMLP, gate=config.moe_shared_expert_gate, submodules=layers)
    return partial(MoELayer, submodules=MoESubmodules(experts=experts, router=Router, shared_experts=shared))
