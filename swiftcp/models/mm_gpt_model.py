"""The multimodal decoder-only model: full stream in, losses of the local labelled tokens out.

The order is the point. The full packed stream is embedded, visual features take their places in it, and only then is anything
cut by `split_cp_inputs`: an image does not end where a shard ends. The model knows no family: what differs comes in as a
tower, a rotary embedding and a configuration.

Legend: B rows (1 when packed), T tokens of the full stream, S local tokens (T / CP), H hidden size, V visual features,
W those whose token is local, N labelled local tokens.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from swiftcp.models.head import token_losses
from swiftcp.models.inputs import ModelInputs
from swiftcp.models.rotary import MultimodalRotary
from swiftcp.models.towers import Tower, encode
from swiftcp.parallel.context import split_cp_inputs


class MultimodalGPTModel(MegatronModule):
    """A vision tower, megatron-core's GPT decoder, and the way of a batch through both."""

    def __init__(
        self,
        config: TransformerConfig,
        decoder_spec: TransformerBlockSubmodules,
        *,
        tower: nn.Module | None,
        rotary: MultimodalRotary,
        cp_group: dist.ProcessGroup,
        vocab_size: int,
        padded_vocab_size: int,
        max_sequence_length: int,
        tied_head: bool,
    ) -> None:
        super().__init__(config=config)
        self.language_model = GPTModel(
            config=config,
            transformer_layer_spec=decoder_spec,
            vocab_size=padded_vocab_size,
            max_sequence_length=max_sequence_length,
            position_embedding_type="none",
            share_embeddings_and_output_weights=tied_head,
        )
        self.visual = tower
        self.rotary = rotary
        self.cp_group = cp_group
        self.vocab_size = vocab_size
        self.model_type = self.language_model.model_type

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """What the previous pipeline stage sent; called by megatron-core's schedules."""
        self.language_model.set_input_tensor(input_tensor)

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Negative log-probability of each labelled token of this rank, [N] float32, in the order of `inputs.targets_N`."""
        decoder_input_SBH, deepstack_LWH = self._decoder_inputs(inputs)
        if self.training and torch.is_grad_enabled() and not decoder_input_SBH.requires_grad:
            # Reentrant recomputation gives no gradient at all where no input requires one (frozen embedding and tower).
            decoder_input_SBH.requires_grad_(True)
        hidden_SBH = self.language_model.decoder(
            hidden_states=decoder_input_SBH,
            attention_mask=None,
            context=deepstack_LWH,
            context_mask=inputs.local_visual_slots_W,
            rotary_pos_emb=self.rotary(inputs.position_ids_3BS),
            packed_seq_params=inputs.packed,
        )
        hidden_NH = hidden_SBH.flatten(0, 1).index_select(0, inputs.label_slots_N)
        return token_losses(hidden_NH, self.head_weight, inputs.targets_N, vocab_size=self.vocab_size)

    @property
    def head_weight(self) -> Tensor:
        """The output head's weight, [padded vocabulary, H]; the embedding's where the head is tied."""
        if self.language_model.share_embeddings_and_output_weights:
            return self.language_model.shared_embedding_or_output_weight()
        return self.language_model.output_layer.weight

    def _decoder_inputs(self, inputs: ModelInputs) -> tuple[Tensor, Tensor | None]:
        """The local decoder input [S, B, H], and the deepstack features of the local visual tokens [levels, W, H]."""
        embeddings_BTH = self.language_model.embedding.word_embeddings(inputs.input_ids_BT)
        deepstack_LWH = None
        if self.visual is not None:
            assert inputs.tower_work is not None
            features = encode(cast(Tower, self.visual), inputs.tower_work, self.cp_group, embeddings_BTH.dtype)
            embeddings_BTH = embeddings_BTH.flatten(0, 1).index_copy(0, inputs.visual_positions_V, features[:, 0]).view_as(embeddings_BTH)
            deepstack_LWH = features[:, 1:].index_select(0, inputs.local_features_W).transpose(0, 1).contiguous()
        decoder_input_TBH = embeddings_BTH.transpose(0, 1).contiguous()
        local = split_cp_inputs(decoder_input_TBH, inputs.cu_seqlens, 0, cp_size=self.cp_group.size(), cp_rank=self.cp_group.rank())
        assert local is not None
        return local, deepstack_LWH
