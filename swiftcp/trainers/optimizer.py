"""Gradient reduction, AdamW and the learning rate's schedule: megatron-core's own, set up from the recipe."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride
from torch import Tensor

from swiftcp.config.bench import BenchConfig
from swiftcp.config.concerns import TrainConfig
from swiftcp.errors import ConfigError
from swiftcp.models.family import Family, part_of
from swiftcp.models.mm_gpt_model import MultimodalGPTModel
from swiftcp.parallel.engine import transformer_engine_problem
from swiftcp.parallel.mesh import Mesh


def check_optimizer(config: TrainConfig) -> None:
    """What saving asks of the optimizer; steps alone do not.

    Raises:
        ConfigError: the distributed optimizer is asked for where its state could not be read back.
    """
    if config.use_distributed_optimizer and (problem := transformer_engine_problem()):
        raise ConfigError(
            f"use_distributed_optimizer is true, but {problem}, and without Transformer Engine megatron-core cannot read the "
            "optimizer's state back: set use_distributed_optimizer false"
        )


def _fuse_gradient_accumulation(model: MultimodalGPTModel) -> None:
    """Let Transformer Engine's layers add weight gradients to the float32 buffer within the product.

    megatron-core (0.19) has a flag for it, but its other layers then ask for Apex.
    """
    for module in model.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True


def wrap_model(chunks: Sequence[MultimodalGPTModel], mesh: Mesh, *, use_distributed_optimizer: bool) -> list[DistributedDataParallel]:
    """Sum gradients over all data- and context-parallel ranks, in float32.

    Call it when it is settled which parameters are trained: only those get a gradient buffer.
    """
    on_cuda = mesh.device.type == "cuda"
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=on_cuda,
        use_distributed_optimizer=use_distributed_optimizer,
        average_in_collective=False,  # sums are divided once, by the count of labelled tokens
    )
    wrapped = [DistributedDataParallel(chunk.config, ddp_config, chunk) for chunk in chunks]
    for chunk in chunks:
        _fuse_gradient_accumulation(chunk)
    config = chunks[0].config  # all chunks share it, and schedules read it
    config.finalize_model_grads_func = finalize_model_grads
    if on_cuda:
        no_sync = [ddp.no_sync for ddp in wrapped]
        config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return wrapped


STATE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
"""megatron-core's types of the optimizer's state; eight-bit floats are stored as bytes."""


def _part_rates(config: TrainConfig | BenchConfig, family: Family) -> dict[ParamKey, ParamGroupOverride]:
    """Peak learning rates of the parts that have their own. A part whose rate is `lr` shares the groups of the language model."""

    def key(part: str) -> ParamKey:
        predicate = ParamWithNamePredicate(part, lambda _, name: part_of(name.removeprefix("module."), family) == part)
        return ParamKey(with_name_predicate=predicate)

    rates = {"vit": config.vit_lr, "aligner": config.aligner_lr}
    return {key(part): ParamGroupOverride(max_lr=lr) for part, lr in rates.items() if lr is not None and lr != config.lr}


def build_optimizer(chunks: Sequence[DistributedDataParallel], config: TrainConfig | BenchConfig, family: Family) -> MegatronOptimizer:
    """AdamW, in groups of parameters by peak learning rate and decay. bfloat16 weights have float32 masters.

    As usual in megatron-core, biases and whatever has one dim (norms) do not decay.
    """
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.min_lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_beta1,
        adam_beta2=config.adam_beta2,
        adam_eps=config.adam_eps,
        clip_grad=config.clip_grad,
        bf16=config.torch_dtype == "bfloat16",
        params_dtype=getattr(torch, str(config.torch_dtype)),
        use_distributed_optimizer=bool(config.use_distributed_optimizer),
        use_precision_aware_optimizer=config.use_precision_aware_optimizer,
        exp_avg_dtype=STATE_TYPES[config.exp_avg_dtype],
        exp_avg_sq_dtype=STATE_TYPES[config.exp_avg_sq_dtype],
    )
    overrides = get_standard_config_overrides(settings) | _part_rates(config, family)
    optimizer = get_megatron_optimizer(settings, list(chunks), config_overrides=overrides, use_gloo_process_groups=False)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    if config.use_precision_aware_optimizer:
        _load_remainders_as_integers(optimizer)
    return optimizer


def _load_remainders_as_integers(optimizer: MegatronOptimizer) -> None:
    """Let a checkpoint's remainders of master weights be read back.

    megatron-core (0.19) carries all of the optimizer's state through its checkpoints as float32, in which 16-bit integers are exact,
    but hands the remainders back as they are, and Transformer Engine (2.20) takes integers alone.
    """
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = part.optimizer
        set_state = adam.set_scaled_state

        def set_scaled_state(parameter: Tensor, name: str, values: Tensor, *, set_state: Callable[..., None] = set_state) -> None:
            is_remainder = name == "master_param" and parameter.dtype == torch.bfloat16
            set_state(parameter, name, values.to(torch.int16) if is_remainder else values)

        adam.set_scaled_state = set_scaled_state


def warmup_iters(config: TrainConfig | BenchConfig, train_iters: int) -> int:
    """Steps of warm-up; always fewer than all."""
    warmup = config.lr_warmup_iters if config.lr_warmup_fraction is None else round(config.lr_warmup_fraction * train_iters)
    return min(warmup, train_iters - 1)


def build_scheduler(optimizer: MegatronOptimizer, config: TrainConfig | BenchConfig, train_iters: int) -> OptimizerParamScheduler:
    """Linear warm-up from 0, then the decay, which reaches `min_lr` after `train_iters` optimizer updates.

    Each group of parameters rises to its own peak; `get_lr({})` is that of the groups without one.
    """
    warmup = warmup_iters(config, train_iters)
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=min(config.min_lr, config.lr),
        lr_warmup_steps=warmup,
        lr_decay_steps=train_iters,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=train_iters,
        wd_incr_style="constant",
    )
