"""What a model family brings: the trainer, the data and the checkpoints know families only through this interface.

Adding a family is a folder under `swiftcp/models/`, a line in `registry.py`, a parity test and a recipe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

    from swiftcp.checkpoint.name_table import NameTable
    from swiftcp.models.rotary import MultimodalRotary
    from swiftcp.models.towers import Geometry
    from swiftcp.parallel.layer_specs import Backend


class Family(Protocol):
    """One model family of `transformers`. `hf_config` is always its `PretrainedConfig`."""

    model_type: str
    """`model_type` of the checkpoint's config.json."""
    architecture: str
    """Name of the `transformers` class that reads and writes the checkpoint (the oracle)."""
    aligner_prefixes: tuple[str, ...]
    """Parameters of the towers, by prefix, that join them to the decoder (`freeze_aligner`, and not `freeze_vit`)."""

    def decoder_config(self, hf_config: Any) -> dict[str, Any]:
        """Fields of megatron-core's `TransformerConfig` that describe the decoder."""
        ...

    def vocab_size(self, hf_config: Any) -> int:
        """Rows of the embedding as the checkpoint stores it."""
        ...

    def max_sequence_length(self, hf_config: Any) -> int:
        """Positions that the model was made for."""
        ...

    def tied_head(self, hf_config: Any) -> bool:
        """Whether the output head is the embedding."""
        ...

    def rotary(self, hf_config: Any) -> MultimodalRotary:
        """The decoder's rotary embedding."""
        ...

    def build_towers(self, hf_config: Any, backend: Backend) -> dict[str, nn.Module]:
        """The towers of `transformers` by name ("visual", "audio"), not initialised, float32, on the current default device."""
        ...

    def tower_geometry(self, hf_config: Any) -> Geometry:
        """What the plan of the towers' work needs to know, by the same names."""
        ...

    def position_ids(
        self,
        hf_config: Any,
        input_ids_L: Tensor,
        image_grid_thw: Tensor | None,
        video_grid_thw: Tensor | None,
        seconds_per_grid_W: Tensor | None,
    ) -> Tensor:
        """[3, L] positions of one sample alone, by the family's own rule; on the host, without building a model.

        They are int64, or float32 in a family that has times between whole positions.
        """
        ...

    def name_table(self, hf_config: Any) -> NameTable:
        """How the names of the checkpoint's tensors pair with the model's."""
        ...


def multimodal_config(hf_config: Any) -> Any:
    """The configuration that has `text_config` and `vision_config`; that of a whole Qwen3-Omni holds it as its thinker's."""
    return getattr(hf_config, "thinker_config", hf_config)


def part_of(name: str, family: Family) -> Literal["llm", "vit", "aligner"]:
    """Which part of the bare model a parameter belongs to, as the keys `freeze_*` and `*_lr` count them."""
    if name.startswith(family.aligner_prefixes):
        return "aligner"
    return "vit" if name.startswith(("visual.", "audio.")) else "llm"
