"""Mixture-of-experts layers: megatron-core's, with a router whose auxiliary losses have the strength that the recipe says.

The gradient that training takes is a sum over all ranks and micro-batches, divided by one number of labelled tokens. An auxiliary loss
of a micro-batch must count as coefficient x loss, averaged over the micro-batches, however many tokens are labelled and wherever they
lie. So `Router` attaches it as it is, and what a backward pass begins with (`scale_auxiliary_losses`) cancels the division.
megatron-core (0.19) scales by the number of real tokens in its place, which is right only where every token is labelled.

Legend: T local tokens (S x B), E experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, topk_routing_with_score_function
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

AUXILIARY_LOSSES = ("load_balancing_loss", "z_loss")


def scale_auxiliary_losses(scale: float | Tensor) -> Tensor:
    """Let each micro-batch's auxiliary losses count `scale` times in the backward passes that follow: the number by which gradients are
    divided afterwards, over the number of micro-batches. Returns it as megatron-core's schedules take it (`moe_grad_scale_func`).
    """
    scale = torch.as_tensor(scale, dtype=torch.float32).view(1)
    MoEAuxLossAutoScaler.set_loss_scale(scale)
    return scale


class Router(TopKRouter):
    """Softmax over all experts, the k likeliest, their probabilities made to add up to one.

    That is the softmax over the k largest logits, in float32. The auxiliary losses are those of one micro-batch, over all ranks that
    share it; padding takes no part, but is routed.

    Load balancing: Fedus et al. 2021, https://arxiv.org/abs/2101.03961 (1 where experts are used evenly); z-loss: Zoph et al. 2022,
    https://arxiv.org/abs/2202.08906.
    """

    def __init__(self, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        coefficients = (config.moe_aux_loss_coeff, config.moe_z_loss_coeff or 0.0)
        self.coefficients_2 = torch.tensor(coefficients, dtype=torch.float32) if any(coefficients) else None  # no buffer: stays float32
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
        if self.coefficients_2 is not None and self.training and torch.is_grad_enabled():
            real_T = torch.ones_like(chosen_TE[:, 0]) if padding_mask is None else ~padding_mask.flatten()
            losses_2 = auxiliary_losses(logits_TE, chosen_TE, real_T, self.tp_cp_group)
            self.recorded_2 = losses_2.detach() + (0.0 if self.recorded_2 is None else self.recorded_2)
            total = losses_2 @ self.coefficients_2.to(losses_2.device, non_blocking=True)
            weights_TE = MoEAuxLossAutoScaler.apply(weights_TE, total)
        return weights_TE, chosen_TE


def auxiliary_losses(logits_TE: Tensor, chosen_TE: Tensor, real_T: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[2] float32: this rank's share of a micro-batch's load-balancing loss and z-loss; the sum over the group is the loss.

    Args:
        chosen_TE: which experts each token goes to.
        real_T: which tokens are no padding.
        group: ranks that share the micro-batch.
    """
    num_experts = logits_TE.size(-1)
    logits_TE = logits_TE.float()
    uses_E = (chosen_TE & real_T[:, None]).sum(0).float()
    dist.all_reduce(uses_E, group=group)
    num_real = real_T.sum().float()
    dist.all_reduce(num_real, group=group)
    num_real = num_real.clamp(min=1)  # a micro-batch of padding alone has losses of 0
    share_E = uses_E / uses_E.sum().clamp(min=1)
    probability_E = (logits_TE.softmax(-1) * real_T[:, None]).sum(0) / num_real
    balance = num_experts * (share_E * probability_E).sum()
    z = (logits_TE.logsumexp(-1).square() * real_T).sum() / num_real
    return torch.stack([balance, z])


def take_auxiliary_losses(model: nn.Module) -> Tensor:
    """[3] float64 on the model's device: this rank's sums since the last call, over its layers and micro-batches, of the losses of
    `AUXILIARY_LOSSES`, and the number of its layers that have a router.
    """
    routers = [module for module in model.modules() if isinstance(module, Router)]
    recorded = [router.recorded_2 for router in routers if router.recorded_2 is not None]
    for router in routers:
        router.recorded_2 = None
    device = next(model.parameters()).device
    losses_2 = torch.stack(recorded).double().sum(0) if recorded else torch.zeros(2, dtype=torch.float64, device=device)
    return torch.cat([losses_2, losses_2.new_tensor([len(routers)])])


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Whether decoder layer `layer`, counted from 0, has experts; `moe_layer_freq` lists all layers."""
    return config.num_moe_experts is not None and bool(config.moe_layer_freq[layer])  # type: ignore[index]


def moe_spec(config: TransformerConfig, provider: BackendSpecProvider) -> Any:
    """An MoE layer for `TransformerLayerSubmodules(mlp=...)`: experts in one grouped product, or one after the other where the backend
    has none."""
    experts = provider.grouped_mlp_modules(config.moe_grouped_gemm)
    return partial(MoELayer, submodules=MoESubmodules(experts=experts, router=Router))
