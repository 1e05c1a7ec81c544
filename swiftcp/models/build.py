"""From a checkpoint's configuration to a model without weights, and what of it is trained."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from swiftcp.errors import ConfigError
from swiftcp.models.family import Family, part_of
from swiftcp.models.mm_gpt_model import MultimodalGPTModel
from swiftcp.parallel.layer_specs import Backend, decoder_spec
from swiftcp.parallel.mesh import Mesh

logger = logging.getLogger(__name__)


def transformer_config(
    family: Family,
    hf_config: Any,
    mesh: Mesh,
    *,
    dtype: torch.dtype,
    backend: Backend,
    cp_comm_type: str | None = None,
    hierarchical_context_parallel_sizes: list[int] | None = None,
    **more: Any,
) -> TransformerConfig:
    """megatron-core's configuration of the decoder.

    The one place for settings that correctness forces: the loss is summed per token and divided by one global count
    (`calculate_per_token_loss`), and nothing is random (no dropout), or results would depend on the layout.

    Args:
        dtype: of the parameters and activations.
        more: megatron-core's fields for experts' losses, recomputation and uneven pipeline stages.
    """
    on_cpu = mesh.device.type == "cpu"
    fused_cp = backend == "te" and mesh.cp_size > 1
    return TransformerConfig(
        **family.decoder_config(hf_config),
        tensor_model_parallel_size=mesh.tp_size,
        sequence_parallel=mesh.sequence_parallel,
        pipeline_model_parallel_size=mesh.pp_size,
        virtual_pipeline_model_parallel_size=mesh.num_chunks if mesh.num_chunks > 1 else None,
        batch_p2p_comm=mesh.num_chunks == 1,  # with several chunks it mixes up the messages of two stages (InterleavedCommunicator)
        context_parallel_size=mesh.cp_size,
        expert_model_parallel_size=mesh.ep_size,
        expert_tensor_parallel_size=mesh.expert_tp_size,
        cp_comm_type=cp_comm_type if fused_cp else None,
        hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes if fused_cp and cp_comm_type == "a2a+p2p" else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # variable lengths ask for it, in dense models too
        moe_grouped_gemm=backend == "te",
        moe_permute_fusion=backend == "te",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=on_cpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=not on_cpu,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=not on_cpu,
        **more,
    )


def _cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and leave buffers: rotary frequencies stay float32."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)


def _keep_replicas_equal(tower: nn.Module) -> None:
    """Let the gradients of the tower be averaged over tensor-parallel ranks, each of which has them whole.

    Kernels that add atomically (the backward pass of attention on CUDA) round differently on each rank, and replicas that are updated
    by gradients that differ in their last bit drift apart.
    """
    for parameter in tower.parameters():
        parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]


def build_chunks(
    family: Family, hf_config: Any, config: TransformerConfig, mesh: Mesh, *, backend: Backend, **how: Any
) -> list[MultimodalGPTModel]:
    """The model chunks of this rank's pipeline stage, in order: one, or as many as virtual pipeline stages. See `build_model`."""
    if mesh.num_chunks == 1:
        return [build_model(family, hf_config, config, mesh, backend=backend, **how)]
    return [build_model(family, hf_config, config, mesh, backend=backend, vp_stage=vp, **how) for vp in range(mesh.num_chunks)]


def build_model(
    family: Family,
    hf_config: Any,
    config: TransformerConfig,
    mesh: Mesh,
    *,
    backend: Backend,
    device: torch.device | None = None,
    vp_stage: int | None = None,
    fuse_norms: bool = True,
) -> MultimodalGPTModel:
    """The model, or this pipeline stage's chunk of it, with its weights not yet set (see `swiftcp.checkpoint`).

    The embedding and the towers are in the first chunk of the first stage, the head in the last chunk of the last stage. On a CPU:
    inside `cpu_mode()`.

    Args:
        device: where the parameters live; the mesh's device where left out, `meta` to see shapes alone.
        vp_stage: which of the stage's chunks; None where it has one alone.
        fuse_norms: see `decoder_spec`.
    """
    pre_process = mesh.is_first_stage and not vp_stage
    post_process = mesh.is_last_stage and vp_stage in (None, mesh.num_chunks - 1)
    vocab_size = family.vocab_size(hf_config)
    rotary = family.rotary(hf_config)
    with torch.device(device or mesh.device):
        towers = family.build_towers(hf_config, backend) if pre_process else {}
        model = MultimodalGPTModel(
            config,
            decoder_spec(config, backend, vp_stage=vp_stage, fuse_norms=fuse_norms),
            towers=towers,
            rotary=rotary,
            cp_group=mesh.cp_group,
            tp_group=mesh.tp_group,
            vocab_size=vocab_size,
            padded_vocab_size=-(-vocab_size // mesh.tp_size) * mesh.tp_size,
            max_sequence_length=family.max_sequence_length(hf_config),
            tied_head=family.tied_head(hf_config),
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            first_expert=mesh.ep_rank * (config.num_moe_experts or 0) // mesh.ep_size,
        )
    for tower in towers.values():
        _cast_parameters(tower, config.params_dtype)
        if mesh.tp_size > 1:
            _keep_replicas_equal(tower)
    return model


def freeze(chunks: Sequence[MultimodalGPTModel], family: Family, *, llm: bool, vit: bool, aligner: bool) -> None:
    """Exclude parts from training. A pipeline stage behind the first may be left with nothing to train.

    Raises:
        ConfigError: nothing is left to train.
    """
    frozen = {"llm": llm, "vit": vit, "aligner": aligner}
    for name, parameter in (named for chunk in chunks for named in chunk.named_parameters()):
        parameter.requires_grad_(not frozen[part_of(name, family)])
    if all(frozen.values()):
        raise ConfigError("freeze_llm, freeze_vit and freeze_aligner are all true, so nothing would be trained: set one to false")
