"""The multimodal decoder-only model: full stream in, losses of the local labelled tokens out.

The order is the point. The full packed stream is embedded, features of towers take their places in it, and only then is anything
cut by `split_cp_inputs`: an image does not end where a shard ends. The model knows no family: what differs comes in as
towers, a rotary embedding and a configuration.

Legend: B rows (1 when packed), T tokens of the full stream, S local tokens (T / CP), H hidden size, V visual features,
W those whose token is local, N labelled local tokens. Under sequence parallelism the decoder's S is S / TP between its matrices.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from swiftcp.models.head import token_losses
from swiftcp.models.inputs import ModelInputs
from swiftcp.models.lora import Adapter
from swiftcp.models.rotary import MultimodalRotary
from swiftcp.models.towers import Tower, encode
from swiftcp.parallel.collectives import scatter_shares
from swiftcp.parallel.context import split_cp_inputs

EXPERT_NUMBER = re.compile(r"(?<=\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+")
"""Where names of megatron-core's experts hold their number, one after the other and grouped."""
LAYERS = "language_model.decoder.layers."


def named_parameters(chunk: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A chunk's parameters under their names in the whole model, whatever wraps it; each parameter of the model is one stage's.

    The copy of a tied embedding in a last stage's head is left out.
    """
    while not isinstance(chunk, MultimodalGPTModel):
        chunk = cast(nn.Module, chunk.module)
    for name, parameter in chunk.named_parameters():
        if not getattr(parameter, "shared", False):
            yield chunk.global_name(name), parameter


class MultimodalGPTModel(MegatronModule):
    """The towers, megatron-core's GPT decoder, and the way of a batch through both; or a chunk of it, for one pipeline stage."""

    def __init__(
        self,
        config: TransformerConfig,
        decoder_spec: TransformerBlockSubmodules,
        *,
        towers: Mapping[str, nn.Module],
        rotary: MultimodalRotary,
        cp_group: dist.ProcessGroup,
        tp_group: dist.ProcessGroup,
        vocab_size: int,
        padded_vocab_size: int,
        max_sequence_length: int,
        tied_head: bool,
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        first_expert: int = 0,
    ) -> None:
        """
        Args:
            towers: by name, "visual" or "audio", as batches name what they encode; none in a chunk that is not the model's first.
            pre_process: the chunk begins with the embedding.
            post_process: the chunk ends with the head.
            vp_stage: which of its pipeline stage's chunks this is; None where the stage has one alone.
            first_expert: of each layer, the number of the first that this rank holds.
        """
        super().__init__(config=config)
        self.language_model = GPTModel(
            config=config,
            transformer_layer_spec=decoder_spec,
            vocab_size=padded_vocab_size,
            max_sequence_length=max_sequence_length,
            position_embedding_type="none",
            share_embeddings_and_output_weights=tied_head,
            pre_process=pre_process,
            post_process=post_process,
            vp_stage=vp_stage,
            scatter_embedding_sequence_parallel=False,  # the visual features come first, and then the cut by CP
        )
        self.visual, self.audio = towers.get("visual"), towers.get("audio")
        self.rotary = rotary
        self.cp_group = cp_group
        self.tp_group = tp_group
        self.vocab_size = vocab_size
        self.pre_process, self.post_process, self.vp_stage = pre_process, post_process, vp_stage
        self.share_embeddings_and_output_weights = tied_head
        self.first_expert = first_expert
        self.saves_frozen = True
        """Whether a resumable checkpoint holds what is not trained; not beside adapters, be they in this chunk or in another."""
        self.model_type = self.language_model.model_type
        if self.visual is not None:
            num_levels = cast(Tower, self.visual).feature_shape[0] - 1
            assert len(self.language_model.decoder.layers) >= num_levels, "deepstack features do not reach a second chunk"

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None) -> dict[str, Any]:
        """What a resumable checkpoint holds: all parameters, or beside adapters what is trained alone."""
        state = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self.saves_frozen:
            return state
        frozen = {f"{prefix}{name}" for name, parameter in self.named_parameters() if not parameter.requires_grad}
        trained = {name: value for name, value in state.items() if name not in frozen}
        for name, adapter in ((name, module) for name, module in self.named_modules() if isinstance(module, Adapter)):
            trained |= adapter.sharded(f"{prefix}{name}.", self.global_name(f"{name}."), self.tp_group, (metadata or {})["dp_cp_group"])
        return trained

    @property
    def towers(self) -> dict[str, nn.Module]:
        """Those that this chunk has, by name, in the order in which they run."""
        return {name: tower for name, tower in (("visual", self.visual), ("audio", self.audio)) if tower is not None}

    def set_input_tensor(self, input_tensor: list[Tensor | None]) -> None:
        """What the previous pipeline stage sent; called by megatron-core's schedules."""
        self.language_model.set_input_tensor(input_tensor)

    def shared_embedding_or_output_weight(self) -> Tensor:
        """The embedding, or its copy in the head of a last stage; megatron-core sums the gradients of both."""
        return self.language_model.shared_embedding_or_output_weight()

    def global_name(self, name: str) -> str:
        """The name that a parameter of this chunk has in the whole model: layers and experts count from the first ones of all."""
        if not name.startswith(LAYERS):
            return name
        layer, _, rest = name.removeprefix(LAYERS).partition(".")
        rest = EXPERT_NUMBER.sub(lambda match: str(int(match[0]) + self.first_expert), rest)
        return f"{LAYERS}{self.language_model.decoder.layers[int(layer)].layer_number - 1}.{rest}"

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Negative log-probability of each labelled token of this rank, [N] float32, in the order of `inputs.targets_N`.

        A chunk without the head returns its hidden states, [S, B, H]; one without the embedding begins with what it was sent.
        """
        decoder_input_SBH, deepstack_LWH = self._decoder_inputs(inputs) if self.pre_process else (None, None)
        if self.training and torch.is_grad_enabled() and decoder_input_SBH is not None and not decoder_input_SBH.requires_grad:
            # Reentrant recomputation gives no gradient at all where no input requires one (frozen embedding and tower).
            decoder_input_SBH.requires_grad_(True)
        hidden_SBH = self.language_model.decoder(
            hidden_states=decoder_input_SBH,
            attention_mask=None,
            context=deepstack_LWH,
            context_mask=inputs.local_visual_slots_W,
            rotary_pos_emb=self.rotary(inputs.position_ids_3BS),
            packed_seq_params=inputs.packed,
            padding_mask=None if self.config.num_moe_experts is None else inputs.padding_mask_BS,
        )
        if not self.post_process:
            return hidden_SBH
        return self._token_losses(hidden_SBH, inputs)

    def _token_losses(self, hidden_SBH: Tensor, inputs: ModelInputs) -> Tensor:
        """[N], the same on all tensor-parallel ranks; each has a part of the vocabulary, hence of the hidden states' gradient.

        The parts are summed once: by the reduce-scatter behind the gather of sequence parallelism, or by the all-reduce behind the copy.
        """
        if self.config.sequence_parallel:
            hidden_SBH = gather_from_sequence_parallel_region(hidden_SBH, group=self.tp_group)
        hidden_NH = hidden_SBH.flatten(0, 1).index_select(0, inputs.label_slots_N)
        if not self.config.sequence_parallel:
            hidden_NH = copy_to_tensor_model_parallel_region(hidden_NH, group=self.tp_group)
        return token_losses(hidden_NH, self.head_weight, inputs.targets_N, vocab_size=self.vocab_size, group=self.tp_group)

    @property
    def head_weight(self) -> Tensor:
        """The output head's weight, [padded vocabulary / TP, H]; the embedding's where the head is tied."""
        if self.language_model.share_embeddings_and_output_weights:
            return self.language_model.shared_embedding_or_output_weight()
        return self.language_model.output_layer.weight

    def _decoder_inputs(self, inputs: ModelInputs) -> tuple[Tensor, Tensor | None]:
        """The local decoder input [S, B, H], and the deepstack features of the local visual tokens [levels, W, H].

        Under sequence parallelism tensor-parallel rank t goes on with the slots [t * S * B / TP, (t + 1) * S * B / TP). Every rank has
        computed all features x of the CP rank, and the loss depends on x_w through the one rank that owns the slot of w: its gradient
        g_w is zero on the others. `scatter_to_sequence_parallel_region` and `scatter_shares` hand each rank its own part and gather the
        parts' gradients in the backward pass, so that dL/dx = g, whole, on every rank; what lies before (the tower, the embedding) then
        has whole gradients for main features and levels alike. A plain slice instead would leave g on the owner alone, and a tower
        parameter with the sum of a whole gradient (main features) and a part of one (levels), of which no reduction makes the right one.
        Without sequence parallelism each rank goes on with all slots, and the decoder's column-parallel matrices have summed the
        gradients of their inputs over the ranks already: whole again.
        """
        embeddings_BTH = self.language_model.embedding.word_embeddings(inputs.input_ids_BT)
        deepstack_LWH = None
        for name, tower in self.towers.items():
            work = inputs.tower_work[name]
            features = encode(cast(Tower, tower), work, self.cp_group, embeddings_BTH.dtype)
            embeddings_BTH = embeddings_BTH.flatten(0, 1).index_copy(0, work.positions_V, features[:, 0]).view_as(embeddings_BTH)
            if name == "visual":
                deepstack_LWH = self._local_deepstack(features[:, 1:], inputs)
        decoder_input_TBH = embeddings_BTH.transpose(0, 1).contiguous()
        local = split_cp_inputs(decoder_input_TBH, inputs.cu_seqlens, 0, cp_size=self.cp_group.size(), cp_rank=self.cp_group.rank())
        assert local is not None
        if self.config.sequence_parallel:
            # A copy, for a part would keep the whole in memory.
            local = scatter_to_sequence_parallel_region(local, group=self.tp_group).clone()
        return local, deepstack_LWH

    def _local_deepstack(self, levels_VLH: Tensor, inputs: ModelInputs) -> Tensor:
        """[levels, W, H]: of the visual tokens that this rank goes on with."""
        deepstack_WLH = levels_VLH.index_select(0, inputs.local_features_W)
        if inputs.visual_shares is not None:
            deepstack_WLH = scatter_shares(deepstack_WLH, inputs.visual_shares, self.tp_group)
        return deepstack_WLH.transpose(0, 1).contiguous()
