"""LoRA: what can be configured, and what a folder in PEFT's format says of its adapter."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from swiftcp.config.concern import Concern, PathText
from swiftcp.config.paths import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE, missing
from swiftcp.errors import ConfigError

ALL_LINEAR = "all-linear"


class AdapterConfig(Concern):
    """A trained adapter that the model begins with."""

    panel = "Model"

    adapters: PathText | None = None
    """Folder of a LoRA adapter in PEFT's format, which the model is used, or trained further, with. None: the model as it is."""


class TunerConfig(Concern):
    """Whether the model's own weights are trained, or low-rank factors beside them."""

    panel = "LoRA"

    tuner_type: Literal["full", "lora"] = "full"
    """`full` trains the weights of all parts that are not frozen; `lora` freezes them and trains adapters of their linear layers."""
    lora_rank: PositiveInt = 8
    """Rank of the adapters."""
    lora_alpha: PositiveFloat = 32
    """Adapters are added times lora_alpha / lora_rank."""
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are dropped in training (Megatron-SWIFT's default is 0.05)."""
    use_rslora: bool = False
    """Add adapters times lora_alpha / sqrt(lora_rank)."""
    target_modules: list[str] = Field([ALL_LINEAR], min_length=1)
    """Layers that get an adapter: all-linear (every linear layer of the parts that are not frozen, but for the output head and routers),
    or names of the checkpoint's layers, their last components suffice: q_proj v_proj."""
    target_regex: str | None = None
    """In place of `target_modules`: a regular expression that the whole name of a layer must match."""
    modules_to_save: list[str] = Field([])
    """Modules whose weights are trained whole, and kept beside the adapters: names as for `target_modules`, `aligner` or `vit`."""
    merge_lora: bool = False
    """Write the merged model to output_dir/hf; false: the adapter, in PEFT's format."""


@dataclass(frozen=True)
class AdapterFacts:
    """What adapter_config.json says that the maths depends on."""

    rank: int
    alpha: float
    dropout: float
    use_rslora: bool

    @property
    def scaling(self) -> float:
        """What adapters are multiplied with; Kalajdzievski 2023, https://arxiv.org/abs/2312.03732, for rsLoRA."""
        return self.alpha / (sqrt(self.rank) if self.use_rslora else self.rank)

    @classmethod
    def of(cls, config: TunerConfig) -> AdapterFacts:
        return cls(config.lora_rank, config.lora_alpha, config.lora_dropout, config.use_rslora)

    def as_keys(self) -> dict[str, Any]:
        """The same by the recipe's keys."""
        return {"lora_rank": self.rank, "lora_alpha": self.alpha, "lora_dropout": self.dropout, "use_rslora": self.use_rslora}


_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False,),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "rank_pattern": ({},),
    "alpha_pattern": ({},),
    "trainable_token_indices": (None,),
    "layer_replication": (None,),
    "megatron_config": (None,),
}
"""What PEFT can do and this project cannot, by the values that leave it off."""


def read_adapter_facts(folder: Path) -> AdapterFacts:
    """Raises: ConfigError: there is no adapter, or it is of a kind that is not supported."""
    if not folder.is_dir():
        raise ConfigError(missing("adapters folder", folder))
    file = folder / ADAPTER_CONFIG_FILE
    absent = [name for name in (ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE) if not (folder / name).is_file()]
    if absent:
        raise ConfigError(f"adapters {folder} holds no {' and no '.join(absent)}: set adapters to a folder in PEFT's format")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
        facts = AdapterFacts(
            rank=int(config["r"]),
            alpha=float(config["lora_alpha"]),
            dropout=float(config.get("lora_dropout") or 0.0),
            use_rslora=bool(config.get("use_rslora")),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is no configuration of a LoRA adapter ({error}): write the adapter again with PEFT") from None
    for key, plain in _PLAIN.items():
        if (value := config.get(key, plain[0])) not in plain and (value or plain[0]):
            raise ConfigError(f"{file}: {key} {value!r} is not supported, only {plain[0]!r}: use plain LoRA, or merge this adapter")
    return facts
