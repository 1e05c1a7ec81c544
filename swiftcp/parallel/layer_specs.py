"""Layer specs of the decoder for both backends, and the two places where our layers differ from megatron-core's.

`RotarySelfAttention` applies the rotary phases that it is handed, which belong to the local tokens, in one call.
megatron-core's own packed rotary restarts each sequence, cuts by CP again, and reads lengths back from the device each layer.

`DeepstackLayer` adds one level of visual features behind it. Features and their places are explicit inputs (`context`,
`context_mask`), for recomputation loses the gradient of what a closure or a hook carries.

Legend: S local tokens, B rows (1 when packed), H hidden size, D values a head, V local visual tokens.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider, LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules, get_transformer_layer_offset
from torch import Tensor, nn

from swiftcp.errors import ConfigError
from swiftcp.parallel.attention import TorchCoreAttention, in_parts
from swiftcp.parallel.engine import transformer_engine_problem
from swiftcp.parallel.gated_delta_net import DeltaSubmodules, GatedDeltaNet, is_linear
from swiftcp.parallel.moe import has_experts, moe_spec

logger = logging.getLogger(__name__)

Backend = Literal["torch", "te"]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32, in the order of Qwen3: the weight multiplies what was rounded to the input's type.

    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467. The signature is that of megatron-core's norms.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, values: Tensor) -> Tensor:
        return self.weight * self._normed(values).to(values.dtype)

    def _normed(self, values: Tensor) -> Tensor:
        """Float32."""
        values_fp32 = values.float()
        return values_fp32 * torch.rsqrt(values_fp32.square().mean(-1, keepdim=True) + self.eps)


class ZeroCenteredRMSNorm(RMSNorm):
    """The norm of Qwen3.5: multiplied by 1 + weight in float32, and rounded behind it."""

    def forward(self, values: Tensor) -> Tensor:
        return (self._normed(values) * (1.0 + self.weight.float())).to(values.dtype)


def _rotate_half(values: Tensor) -> Tensor:
    first, second = values.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary(heads_SBHD: Tensor, phases_SB1D: Tensor) -> Tensor:
    """Rotate queries or keys by the phases of their own positions, with cosines and sines in the heads' type.

    Args:
        heads_SBHD: queries or keys.
        phases_SB1D: radians, float32; where there are fewer than values of a head, the last values stay as they are.
    """
    cos, sin = phases_SB1D.cos().to(heads_SBHD.dtype), phases_SB1D.sin().to(heads_SBHD.dtype)
    rotated, rest = heads_SBHD.tensor_split([phases_SB1D.size(-1)], dim=-1)
    rotated = rotated * cos + _rotate_half(rotated) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.size(-1) else rotated


def apply_rotary_fused(heads_SBHD: Tensor, phases_SB1D: Tensor) -> Tensor:
    """The same in one kernel of Transformer Engine, float32 inside.

    Its phases have no row dim, so tokens of all rows are handed over as one sequence.
    """
    from megatron.core.extensions.transformer_engine import fused_apply_rotary_pos_emb

    flat = fused_apply_rotary_pos_emb(heads_SBHD.flatten(0, 1).unsqueeze(1), phases_SB1D.flatten(0, 1).unsqueeze(1))
    return flat.view(heads_SBHD.shape)


class RotarySelfAttention(SelfAttention):
    """Self-attention whose `rotary_pos_emb` is [S, B, 1, D], phases of the local tokens in radians, float32."""

    _rotate = staticmethod(apply_rotary)
    _phases: Tensor | None = None

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, *, rotary_pos_emb: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
        """hidden_states [S, B, H]; returns megatron-core's (output [S, B, H], bias)."""
        self._phases = rotary_pos_emb
        try:
            return super().forward(hidden_states, attention_mask, rotary_pos_emb=None, **kwargs)
        finally:
            self._phases = None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        """The rotated query and key behind their norms, then the value and what else the model has."""
        query, key, *rest = super().get_query_key_value_tensors(*args, **kwargs)
        assert self._phases is not None
        return self._rotate(query, self._phases), self._rotate(key, self._phases), *rest


class FusedRotarySelfAttention(RotarySelfAttention):
    """The same with Transformer Engine's kernel."""

    _rotate = staticmethod(apply_rotary_fused)


class DeepstackLayer(TransformerLayer):
    """A decoder layer behind which one level of deepstack features is added at the visual tokens.

    Meng et al. 2024, https://arxiv.org/abs/2406.04334.
    """

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, context: Tensor | None = None, context_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Args:
            hidden_states: [S, B, H].
            context: [levels, V, H] features of the local visual tokens, or None where the model has no deepstack.
            context_mask: [V] int64, their places in the flattened [S * B] local stream.
        Returns:
            The layer's output, and `context` as it came.
        """
        hidden_states, _ = super().forward(hidden_states, **kwargs)
        level = self.layer_number - 1
        if context is not None and level < context.size(0):
            assert context_mask is not None
            flat = hidden_states.flatten(0, 1).index_add(0, context_mask, context[level])
            hidden_states = flat.view_as(hidden_states)
        return hidden_states, context


class TorchSpecProvider(LocalSpecProvider):
    """megatron-core's own linear layers with our norm and core attention: runs on a CPU and on CUDA, without Transformer Engine."""

    def __init__(self, norm: type[RMSNorm]) -> None:
        super().__init__()
        self.norm = norm

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return self.norm

    def core_attention(self) -> type:
        return TorchCoreAttention


def select_backend(attention_backend: str) -> Backend:
    """What `attention_backend` means in this process; `auto` takes Transformer Engine where it works and says what it took.

    Raises:
        ConfigError: Transformer Engine is asked for and cannot be used.
    """
    if attention_backend == "torch":
        return "torch"
    problem = transformer_engine_problem()
    if attention_backend == "te" and problem:
        raise ConfigError(f"attention_backend is te, but {problem}: use attention_backend torch or auto")
    backend: Backend = "torch" if problem else "te"
    logger.info("attention backend: %s%s", backend, f" ({problem})" if problem else "")
    return backend


def _provider(config: TransformerConfig, backend: Backend, fuse_norms: bool) -> BackendSpecProvider:
    if backend == "torch":
        return TorchSpecProvider(ZeroCenteredRMSNorm if config.layernorm_zero_centered_gamma else RMSNorm)
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    class Unfused(TESpecProvider):
        """Norms as layers of their own, so that what a linear layer is given is what it multiplies."""

        def fuse_layernorm_and_linear(self) -> bool:
            return False

    return TESpecProvider() if fuse_norms else Unfused()


def _attention_spec(config: TransformerConfig, provider: BackendSpecProvider) -> ModuleSpec:
    fused = provider.fuse_layernorm_and_linear()
    qk_norm = provider.layer_norm(rms_norm=True, for_qk=True) if config.qk_layernorm else IdentityOp
    on_engine = not isinstance(provider, TorchSpecProvider)
    return ModuleSpec(
        module=FusedRotarySelfAttention if on_engine else RotarySelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_layer_norm_linear() if fused else provider.column_parallel_linear(),
            core_attention=in_parts(provider.core_attention()) if on_engine else provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=qk_norm,
            k_layernorm=qk_norm,
        ),
    )


def _delta_spec(provider: BackendSpecProvider) -> ModuleSpec:
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=DeltaSubmodules(in_proj=provider.column_parallel_linear(), out_proj=provider.row_parallel_linear()),
    )


def _layer_spec(config: TransformerConfig, provider: BackendSpecProvider, *, sparse: bool, linear: bool) -> ModuleSpec:
    fused = provider.fuse_layernorm_and_linear()
    own_norm = provider.layer_norm(rms_norm=True)
    norm = IdentityOp if fused else own_norm
    # One checkpoint for both backends: the fused layers keep the norms inside the linear layers. Routers and delta nets have none inside.
    names = {}
    if not fused and not linear:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if not fused and not sparse:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    submodules = TransformerLayerSubmodules(
        input_layernorm=own_norm if linear else norm,
        self_attention=_delta_spec(provider) if linear else _attention_spec(config, provider),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=own_norm if sparse else norm,
        mlp=moe_spec(config, provider) if sparse else get_mlp_module_spec_for_backend(backend=provider),
        mlp_bda=get_bias_dropout_add,
        sharded_state_dict_keys_map=names,
    )
    return ModuleSpec(module=DeepstackLayer, submodules=submodules)


def decoder_spec(
    config: TransformerConfig, backend: Backend, *, vp_stage: int | None = None, fuse_norms: bool = True
) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage, for `GPTModel(transformer_layer_spec=...)`.

    Args:
        fuse_norms: let Transformer Engine compute a norm within the linear layer behind it. Adapters need the norm's output.
    """
    provider = _provider(config, backend, fuse_norms)
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = range(first, first + get_num_layers_to_build(config, vp_stage=vp_stage))
    specs = [_layer_spec(config, provider, sparse=has_experts(config, layer), linear=is_linear(config, layer)) for layer in layers]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=provider.layer_norm(rms_norm=True))
