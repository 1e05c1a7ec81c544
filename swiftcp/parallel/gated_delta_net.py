"""The gated delta net as a layer of megatron-core: packed and padded streams, context and tensor parallelism.

The convolution and the recurrence need whole sequences in order, so the context-parallel partition is undone around them: one
all-to-all turns this rank's tokens of all heads into all tokens of its heads, another one brings the outputs back. What is left in
between knows sequences alone. Nothing asks the device for lengths: they come with the pack, and its indices are made once.

Legend: S local tokens, B rows (1 when packed), T tokens of the full stream (S x CP), H hidden size, C channels; R tokens of all rows,
one rank's after the other's (T x B).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.utils import _split_tensor_factory
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn

from swiftcp.parallel.collectives import exchange
from swiftcp.parallel.context import stream_order
from swiftcp.parallel.delta_rule import causal_convolution, fla_kernel, gated_delta_rule
from swiftcp.parallel.packed import PackedStream, SequenceGroup


@dataclass(frozen=True)
class DeltaSubmodules:
    """What the layer takes from a backend."""

    in_proj: Any
    out_proj: Any


def is_linear(config: TransformerConfig, layer: int) -> bool:
    """Whether decoder layer `layer`, counted from 0, is a gated delta net; `linear_attention_freq` lists all layers."""
    return config.linear_attention_freq is not None and bool(config.linear_attention_freq[layer])  # type: ignore[index]


@dataclass(frozen=True)
class Sequences:
    """Where the sequences of a micro-batch lie among the R tokens."""

    groups: list[SequenceGroup]
    packed: PackedStream | None
    cp_size: int

    @classmethod
    def of(cls, packed: PackedStream | None, num_local: int, num_rows: int, cp_size: int, device: torch.device) -> Sequences:
        """`num_local`: S."""
        if packed is not None:
            return cls(packed.groups(cp_size), packed, cp_size)
        length = num_local * cp_size
        # [B, T]: row b's token t is at order[t] * B + b
        order = stream_order(None, length, cp_size=cp_size, device=device)
        slots = (order * num_rows + torch.arange(num_rows, device=device)[:, None]).flatten()
        return cls([SequenceGroup(length, slots, slots)], None, cp_size)

    def each(self, compute: Callable[..., Tensor], *streams: Tensor) -> Tensor:
        """`compute` over whole sequences, [n, L, ...] each, of one length at a time; streams and result are [R, ...]."""
        outputs = []
        for group in self.groups:
            batch = (stream.index_select(0, group.gathered_slots).unflatten(0, (-1, group.length)) for stream in streams)
            outputs.append(compute(*batch).flatten(0, 1))
        inverse = self.packed.inverse_of_groups(self.cp_size) if self.packed is not None else self.groups[0].gathered_slots.argsort()
        return torch.cat(outputs).index_select(0, inverse)


class GatedDeltaNet(MegatronModule):
    """Yang et al. 2024, https://arxiv.org/abs/2412.06464, with the projections of Qwen3.5.

    `A_log`, `dt_bias` and the gain of the norm are float32 whatever the type of the other parameters.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: DeltaSubmodules,
        layer_number: int,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group: dist.ProcessGroup = groups.tp
        self.cp_group: dist.ProcessGroup = groups.cp
        tp = self.tp_group.size()
        assert config.linear_num_key_heads is not None and config.linear_num_value_heads is not None
        assert config.linear_key_head_dim is not None and config.linear_value_head_dim is not None
        self.num_key_heads, self.num_value_heads = config.linear_num_key_heads // tp, config.linear_num_value_heads // tp
        assert self.num_key_heads % self.cp_group.size() == 0, "tp x cp must divide linear_num_key_heads"
        self.key_dim, self.value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        keys, values = self.num_key_heads * self.key_dim, self.num_value_heads * self.value_dim
        self.mixed_sizes = [keys, keys, values, self.num_value_heads, self.num_value_heads]
        """Channels of query, key, value, b and a on this tensor-parallel rank; those of z come behind them."""
        common: dict[str, Any] = dict(config=config, bias=False, is_expert=False, tp_group=self.tp_group)
        self.in_proj = submodules.in_proj(
            config.hidden_size,
            (sum(self.mixed_sizes) + values) * tp,
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        self.out_proj = submodules.out_proj(
            values * tp,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )
        self.conv1d = nn.Conv1d(
            sum(self.mixed_sizes[:3]),
            sum(self.mixed_sizes[:3]),
            config.linear_conv_kernel_dim or 1,
            groups=sum(self.mixed_sizes[:3]),
            bias=False,
            dtype=config.params_dtype,
        )
        self.A_log = nn.Parameter(torch.zeros(self.num_value_heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.ones(self.num_value_heads, dtype=torch.float32))
        self.norm = nn.ParameterDict({"weight": torch.ones(self.value_dim, dtype=torch.float32)})
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        self.kernel = fla_kernel() if config.params_dtype != torch.float32 else None

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, *, packed_seq_params: PackedStream | None = None, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [S, B, H], or this tensor-parallel rank's part of it under sequence parallelism; returns the same, and no bias."""
        projected, _ = self.in_proj(hidden_states)
        mixed, gate = projected.split([sum(self.mixed_sizes), self.num_value_heads * self.value_dim], dim=-1)
        output = self._from_heads(self._over_sequences(self._to_heads(mixed), packed_seq_params))
        return self.out_proj(self._gated_norm(output, gate))[0], None

    def _to_heads(self, mixed: Tensor) -> Tensor:
        """[S, B, C] of this rank's tokens -> [T, B, C / CP], all ranks' tokens, of this rank's heads."""
        cp_size = self.cp_group.size()
        if cp_size == 1:
            return mixed
        parts = [part.unflatten(-1, (cp_size, -1)) for part in mixed.split(self.mixed_sizes, dim=-1)]
        return exchange(torch.cat(parts, dim=-1).movedim(2, 0), self.cp_group).flatten(0, 1)

    def _from_heads(self, output: Tensor) -> Tensor:
        """[T, B, C / CP] -> [S, B, C]; the inverse of `_to_heads` for heads of one kind."""
        cp_size = self.cp_group.size()
        if cp_size == 1:
            return output
        return exchange(output.unflatten(0, (cp_size, -1)), self.cp_group).movedim(0, 2).flatten(2)

    def _own_heads(self, parameter: Tensor, sizes: list[int]) -> Tensor:
        """What belongs to this context-parallel rank's heads, of consecutive parts of these sizes along dim 0."""
        cp_size, rank = self.cp_group.size(), self.cp_group.rank()
        return torch.cat([part.chunk(cp_size)[rank] for part in parameter.split(sizes)]) if cp_size > 1 else parameter

    def _over_sequences(self, mixed_TBC: Tensor, packed: PackedStream | None) -> Tensor:
        """[T, B, C] of this rank's heads -> their outputs, [T, B, value heads x value_dim]."""
        num_rows, cp_size = mixed_TBC.size(1), self.cp_group.size()
        sequences = Sequences.of(packed, mixed_TBC.size(0) // cp_size, num_rows, cp_size, mixed_TBC.device)
        sizes = [size // cp_size for size in self.mixed_sizes]
        heads_RC, beta_RH, step_RH = mixed_TBC.flatten(0, 1).split([sum(sizes[:3]), *sizes[3:]], dim=-1)
        filters = self._own_heads(self.conv1d.weight, self.mixed_sizes[:3])
        filtered_RC = sequences.each(lambda values: causal_convolution(values, filters), heads_RC)
        query, key, value = (
            part.unflatten(-1, (-1, dim))
            for part, dim in zip(filtered_RC.split(sizes[:3], dim=-1), (self.key_dim, self.key_dim, self.value_dim), strict=True)
        )
        a_log, dt_bias = (self._own_heads(parameter, [self.num_value_heads]) for parameter in (self.A_log, self.dt_bias))
        decay_RH = -a_log.exp() * F.softplus(step_RH.float() + dt_bias)
        repeats = self.num_value_heads // self.num_key_heads
        if repeats > 1:
            query, key = query.repeat_interleave(repeats, dim=1), key.repeat_interleave(repeats, dim=1)
        output = self._recurrence(sequences, query, key, value, decay_RH, beta_RH.sigmoid())
        return output.flatten(1).unflatten(0, (-1, num_rows))

    def _recurrence(self, sequences: Sequences, *streams: Tensor) -> Tensor:
        """[R, value heads, value_dim], from query, key, value, decay and beta, [R, value heads, ...] each."""
        kernel, packed = self.kernel, sequences.packed
        if kernel is None:
            return sequences.each(gated_delta_rule, *streams)
        if packed is None:
            return sequences.each(lambda *batch: kernel(*batch, use_qk_l2norm_in_kernel=True)[0], *streams)
        order, slots = packed.orders(sequences.cp_size)
        in_order = (stream.index_select(0, order)[None] for stream in streams)
        output, _ = kernel(*in_order, cu_seqlens=packed.cu_seqlens_q, use_qk_l2norm_in_kernel=True)
        return output[0].index_select(0, slots)

    def _gated_norm(self, output_SBC: Tensor, gate_SBC: Tensor) -> Tensor:
        """Root-mean-square norm of each head, then SiLU of its gate, in float32 but for the normed values, as the model has it.

        Each tensor-parallel rank has its own heads' part of the gain's gradient: the copy sums the parts.
        """
        weight = copy_to_tensor_model_parallel_region(self.norm["weight"], group=self.tp_group)
        values = output_SBC.unflatten(-1, (-1, self.value_dim)).float()
        normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.config.layernorm_epsilon)
        gain = weight * normed.to(output_SBC.dtype)
        gated = gain * F.silu(gate_SBC.unflatten(-1, (-1, self.value_dim)).float())
        return gated.to(output_SBC.dtype).flatten(-2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """megatron-core's description of the parameters; parts of a matrix are cut one by one, so that another TP size can read them."""
        dp_cp_group = None if metadata is None else metadata["dp_cp_group"]
        own = {"A_log": self.A_log, "dt_bias": self.dt_bias, "conv1d.weight": self.conv1d.weight, "norm.weight": self.norm["weight"]}
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {"A_log": 0, "dt_bias": 0, "conv1d.weight": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=dp_cp_group,
        )
        for name in ("in_proj", "out_proj"):
            state |= sharded_state_dict_default(getattr(self, name), f"{prefix}{name}.", sharded_offsets, metadata, tp_group=self.tp_group)
        names = ["query", "key", "value", "b", "a", "z"]
        sizes = {"conv1d.weight": self.mixed_sizes[:3], "in_proj.weight": [*self.mixed_sizes, self.num_value_heads * self.value_dim]}
        for name, of_parts in sizes.items():
            state[f"{prefix}{name}"] = _split_tensor_factory(state[f"{prefix}{name}"], of_parts, names[: len(of_parts)], 0)
        return state
