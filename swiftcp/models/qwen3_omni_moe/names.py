"""Names of Qwen3-Omni-MoE's tensors: what `save_pretrained` writes, and where each stands in `MultimodalGPTModel`.

The whole model's names begin with `thinker.`, which those of a thinker alone lack. Experts are stored one by one. The talker and
code2wav are no part of our model: they are carried over from the folder that the weights came from.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from swiftcp.checkpoint.name_table import NameTable, Prefix, Rule
from swiftcp.models.family import multimodal_config
from swiftcp.models.qwen3_vl.names import EMBEDDING, HEAD, decoder_rules
from swiftcp.models.qwen3_vl_moe.names import ROUTER, single_expert_rules

CARRIED = ("talker.", "code2wav.")


def _stored(name: str, root: str) -> str:
    """The name of a tensor of the decoder, given that in Qwen3-VL."""
    return root + name.replace("model.language_model.", "model.")


def _renamed(rule: Rule, root: str) -> Rule:
    return replace(rule, sources=tuple(_stored(name, root) for name in rule.sources))


def qwen3_omni_name_table(hf_config: Any) -> NameTable:
    """The table of what a `Qwen3OmniMoeConfig` or a `Qwen3OmniMoeThinkerConfig` describes."""
    thinker = multimodal_config(hf_config)
    text = thinker.text_config
    root = "" if thinker is hf_config else "thinker."
    return NameTable(
        rules=(
            *(_renamed(rule, root) for rule in (*decoder_rules(text), ROUTER)),
            *single_expert_rules(root + "model.layers.", text.num_experts),
            Prefix(root + "visual.", "visual."),
            Prefix(root + "audio_tower.", "audio."),
        ),
        num_layers=text.num_hidden_layers,
        tied={_stored(HEAD, root): _stored(EMBEDDING, root)} if thinker.tie_word_embeddings else {},
        base_prefix="thinker.",
        carried=CARRIED if root else (),
    )
