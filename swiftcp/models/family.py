"""What a model family brings: the trainer, the data and the checkpoints know families only through this interface.

Adding a family is a folder under `swiftcp/models/`, a line in `registry.py`, a parity test and a recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from swiftcp.checkpoint.name_table import NameTable
    from torch import Tensor, nn


class Family(Protocol):
    """One model family of `transformers`. `hf_config` is always its `PretrainedConfig`."""

    model_type: str
    """`model_type` of the checkpoint's config.json."""
    architecture: str
    """Name of the `transformers` class that reads and writes the checkpoint (the oracle)."""

    def decoder_config(self, hf_config: Any) -> dict[str, Any]:
        """Fields of megatron-core's `TransformerConfig` that describe the decoder."""
        ...

    def rotary(self, hf_config: Any) -> nn.Module:
        """The decoder's rotary embedding: `position_ids [3, B, S] -> frequencies [S, B, 1, d]`, float32."""
        ...

    def build_tower(self, hf_config: Any) -> nn.Module:
        """The vision tower of `transformers`, with random weights, float32."""
        ...

    def position_ids(self, hf_config: Any, input_ids_L: Tensor, image_grid_thw: Tensor | None, video_grid_thw: Tensor | None) -> Tensor:
        """[3, L] int64 positions of one sample alone, by the family's own rule; on the host, without building a model."""
        ...

    def name_table(self, hf_config: Any) -> NameTable:
        """How the names of the checkpoint's tensors pair with the model's."""
        ...
