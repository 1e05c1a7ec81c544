"""Core attention in plain PyTorch, with context parallelism over any process group.

It keeps the contract of Transformer Engine's core attention: packed (`thd`) and padded (`sbhd`) streams cut by
`swiftcp.parallel.context`, causal inside each sequence. Keys and values are gathered over the group (their gradients are
reduce-scattered), queries stay local: exact in any layout, and the same code on gloo and NCCL. Sequences that stay whole on a rank
take no part in that: `attend_in_parts` serves both this attention and Transformer Engine's.

Legend: T local tokens of a pack, S local tokens of a padded row, B rows, N sequences taken as one batch, L tokens of one full
sequence, c tokens of one chunk (L / 2CP), H query heads, G key/value heads, D values a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from swiftcp.parallel.collectives import gather_first_dim
from swiftcp.parallel.context import stream_order
from swiftcp.parallel.packed import PackedStream


def _causal_tail(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Causal attention of queries that are the last `query.size(2)` positions of the keys' sequence.

    Args:
        query: [N, H, q, D]; key, value: [N, G, k, D] with k >= q.
    """
    num_queries, num_keys = query.size(2), key.size(2)
    grouped = query.size(1) != key.size(1)
    if num_queries == num_keys:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device).tril_(num_keys - num_queries)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=grouped)


def chunked_causal_attention(query: Tensor, key: Tensor, value: Tensor, *, cp_size: int, cp_rank: int, scale: float) -> Tensor:
    """This rank's queries of N equally long sequences against the whole sequences.

    Args:
        query: [N, H, 2c, D], chunks `cp_rank` and `2*cp_size - 1 - cp_rank` of each sequence.
        key, value: [N, G, L, D], in order.

    Returns:
        [N, H, 2c, D].
    """
    if cp_size == 1:
        return _causal_tail(query, key, value, scale)
    chunk = query.size(2) // 2
    outputs = []
    for part, chunk_number in enumerate((cp_rank, 2 * cp_size - 1 - cp_rank)):
        num_seen = (chunk_number + 1) * chunk
        part_query = query[:, :, part * chunk : (part + 1) * chunk]
        outputs.append(_causal_tail(part_query, key[:, :, :num_seen], value[:, :, :num_seen], scale))
    return torch.cat(outputs, dim=2)


Attend = Callable[[Tensor, Tensor, Tensor, PackedStream], Tensor]


def attend_in_parts(query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, stream: PackedStream, *, whole: Attend, cut: Attend) -> Tensor:
    """Attention of a local stream: `whole` for the sequences that the rank has whole, `cut`, across the group, for the others.

    All ranks of the group call `cut`, or none.
    """
    parts = stream.parts
    if parts is None:
        return cut(query_THD, key_TGD, value_TGD, stream)
    end = parts.num_whole
    outputs = [whole(query_THD[:end], key_TGD[:end], value_TGD[:end], parts.whole)]
    if parts.cut is not None:
        outputs.append(cut(query_THD[end:], key_TGD[end:], value_TGD[end:], parts.cut))
    return torch.cat(outputs)


class _InParts:
    """Puts `attend_in_parts` before the core attention of megatron-core on Transformer Engine."""

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        def cut(query: Tensor, key: Tensor, value: Tensor, stream: Any) -> Tensor:
            return super(_InParts, self).forward(query, key, value, *args, packed_seq_params=stream, **kwargs)  # type: ignore[misc]

        def whole(query: Tensor, key: Tensor, value: Tensor, stream: PackedStream) -> Tensor:
            group = (self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type)
            self.set_context_parallel_group(None, None, None, self.cp_comm_type)  # what megatron-core does where `local_cp_size` is 1
            try:
                return cut(query, key, value, stream)
            finally:
                self.set_context_parallel_group(*group)

        if packed_seq_params is None:
            return cut(query, key, value, None)
        return attend_in_parts(query, key, value, packed_seq_params, whole=whole, cut=cut)


@cache
def in_parts(core_attention: type) -> type:
    """megatron-core's `TEDotProductAttention`, for streams in which some sequences are whole.

    Its own way (0.19), a pack with `local_cp_size` 1 and then one with `cp_group`, knows no hierarchical groups: what it had is put
    back instead. The backward pass keeps the groups that its forward pass had.
    """
    return type(f"{core_attention.__name__}InParts", (_InParts, core_attention), {})


class TorchCoreAttention(MegatronModule):
    """Causal core attention on `torch.nn.functional.scaled_dot_product_attention`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.attention_dropout or attention_dropout:
            raise ValueError("attention dropout is not supported: results could not be equal in every layout")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group: dist.ProcessGroup = groups.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedStream | None = None,
    ) -> Tensor:
        """Packed: query [T, H, D], key and value [T, G, D], returns [T, H * D]. Padded: [S, B, H, D] and so on, returns [S, B, H * D].

        Padding stands behind each row's tokens, where causal attention cannot see it, so masks are not needed.
        """
        assert attention_mask is None and attention_bias is None, "causal streams carry no mask and no bias"
        if packed_seq_params is None:
            return self._padded(query, key, value)
        return attend_in_parts(query, key, value, packed_seq_params, whole=self._whole, cut=self._cut)

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all ranks, one rank's stream behind the other, in one collective."""
        if self.cp_group.size() == 1:
            return key, value
        keys, values = gather_first_dim(torch.cat([key, value], dim=-1), self.cp_group).chunk(2, dim=-1)
        return keys, values

    def _whole(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, stream: PackedStream) -> Tensor:
        return self._packed(query_THD, key_TGD, value_TGD, stream, cp_size=1, cp_rank=0)

    def _cut(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, stream: PackedStream) -> Tensor:
        key_TGD, value_TGD = self._gather(key_TGD, value_TGD)
        return self._packed(query_THD, key_TGD, value_TGD, stream, cp_size=self.cp_group.size(), cp_rank=self.cp_group.rank())

    def _packed(self, query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, stream: PackedStream, *, cp_size: int, cp_rank: int) -> Tensor:
        """Local queries against the keys and values of the whole stream."""
        groups = stream.groups(cp_size)
        outputs, slots = [], []
        for group in groups:
            query, key, value = (
                # [T, H, D] -> [N, H, L/CP or L, D]
                tensor.index_select(0, index).unflatten(0, (-1, length)).transpose(1, 2)
                for tensor, index, length in (
                    (query_THD, group.local_slots, group.length // cp_size),
                    (key_TGD, group.gathered_slots, group.length),
                    (value_TGD, group.gathered_slots, group.length),
                )
            )
            output = chunked_causal_attention(query, key, value, cp_size=cp_size, cp_rank=cp_rank, scale=self.scale)
            outputs.append(output.transpose(1, 2).flatten(0, 1))
            slots.append(group.local_slots)
        if len(groups) == 1:
            return outputs[0].flatten(1)
        output_THD = torch.cat(outputs).index_select(0, torch.cat(slots).argsort())
        return output_THD.flatten(1)

    def _padded(self, query_SBHD: Tensor, key_SBGD: Tensor, value_SBGD: Tensor) -> Tensor:
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        key_SBGD, value_SBGD = self._gather(key_SBGD, value_SBGD)
        if cp_size > 1:
            order = stream_order(None, query_SBHD.size(0) * cp_size, cp_size=cp_size, device=query_SBHD.device)
            key_SBGD, value_SBGD = key_SBGD.index_select(0, order), value_SBGD.index_select(0, order)
        # [S, B, H, D] -> [B, H, S, D]
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query_SBHD, key_SBGD, value_SBGD))
        output = chunked_causal_attention(query, key, value, cp_size=cp_size, cp_rank=cp_rank, scale=self.scale)
        return output.permute(2, 0, 1, 3).flatten(2)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """No parameters, nothing to save."""
        return {}
