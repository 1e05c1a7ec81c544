"""Which layers get an adapter, and which weights are trained whole beside them; by the checkpoint's names, alike on all ranks."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np
import torch
from torch import nn

from swiftcp.checkpoint.name_table import ADAPTER, NameTable, Rule, VocabularyRows
from swiftcp.checkpoint.together import gather_all
from swiftcp.config.concerns import FreezeConfig
from swiftcp.config.tuner import ALL_LINEAR, AdapterFacts, TunerConfig
from swiftcp.errors import ConfigError
from swiftcp.models.family import Family, part_of
from swiftcp.models.lora import attach
from swiftcp.models.mm_gpt_model import MultimodalGPTModel, named_parameters
from swiftcp.parallel.mesh import Mesh
from swiftcp.parallel.place import TensorPlace

PART_WORDS = ("aligner", "vit")
"""What `modules_to_save` may name beside modules."""


@dataclass(frozen=True)
class LoraPlan:
    """What of a model is trained."""

    facts: AdapterFacts
    layers: frozenset[str]
    """The checkpoint's linear layers that get factors."""
    saved: frozenset[str]
    """The checkpoint's tensors that are trained whole."""


@dataclass(frozen=True)
class Site:
    """A linear layer of ours that may get an adapter."""

    name: str
    """Of its weight, in the whole model."""
    module: nn.Module
    rule: Rule


def find_sites(chunks: Sequence[MultimodalGPTModel], table: NameTable) -> list[Site]:
    """The linear layers of the towers, and the matrices of the decoder but for embedding, head, routers and experts.

    Experts are shared by other ranks than the rest, and are no linear layers in the checkpoint's own model.
    """
    found: dict[str, nn.Module] = {}
    for chunk in chunks:
        for name, module in chunk.named_modules():
            weight = getattr(module, "weight", None)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                found[chunk.global_name(f"{name}.weight")] = module
    sites = [Site(name, found[name], rule) for name, rule in table.pair(list(found)).items()]
    return [site for site in sites if isinstance(site.module, nn.Linear) or _is_cut_matrix(site.rule)]


def _is_cut_matrix(rule: Rule) -> bool:
    return rule.parallel_dim is not None and not rule.is_expert and not isinstance(rule, VocabularyRows)


def _names(pattern: str) -> Callable[[str], bool]:
    """Whether a layer's name is `pattern`, or ends with it behind a dot; as in PEFT."""
    return lambda name: name == pattern or name.endswith(f".{pattern}")


def _within(pattern: str) -> Callable[[str], bool]:
    """Whether a tensor belongs to a module of that name."""
    return lambda name: f".{pattern}." in f".{name}"


def plan_from_config(
    config: TunerConfig, frozen: FreezeConfig, chunks: Sequence[MultimodalGPTModel], table: NameTable, family: Family
) -> LoraPlan:
    """Called on all ranks, each with its pipeline stage's chunks.

    Raises:
        ConfigError: a pattern matches no layer of a part that is not frozen, or what cannot be trained.
    """
    is_frozen = {"llm": frozen.freeze_llm, "vit": frozen.freeze_vit, "aligner": frozen.freeze_aligner}
    own_layers = {layer: part_of(site.name, family) for site in find_sites(chunks, table) for layer in site.rule.layers()}
    targets = [name for chunk in chunks for name, _ in named_parameters(chunk)]
    own_tensors = {source: part_of(target, family) for target, rule in table.pair(targets).items() for source in rule.sources}
    layers, tensors = (_of_all_ranks(own, is_frozen) for own in (own_layers, own_tensors))
    saved = _chosen(config.modules_to_save, tensors, lambda word: _within(word), "modules_to_save")
    _check_saved(saved, table)
    trained_whole = {name.removesuffix(".weight") for name in saved}
    free = {layer: part for layer, part in layers.items() if layer not in trained_whole}
    if config.target_regex is not None:
        pattern = re.compile(config.target_regex)
        chosen = {layer for layer in free if pattern.fullmatch(layer)}
        if not chosen:
            raise _no_match("target_regex", config.target_regex, layers)
    elif config.target_modules == [ALL_LINEAR]:
        chosen = set(free)
    else:
        chosen = _chosen(config.target_modules, free, _names, "target_modules")
    return LoraPlan(AdapterFacts.of(config), frozenset(chosen), frozenset(saved))


def _of_all_ranks(own: Mapping[str, str], is_frozen: Mapping[str, bool]) -> dict[str, str]:
    """Names and parts, of all pipeline stages, without those that are frozen."""
    return {name: part for of_rank in gather_all(dict(own)) for name, part in of_rank.items() if not is_frozen[part]}


def _chosen(patterns: Sequence[str], names: Mapping[str, str], matcher: Callable[[str], Callable[[str], bool]], key: str) -> set[str]:
    """The names that a pattern matches; each pattern must match one."""
    chosen: set[str] = set()
    for pattern in patterns:
        if key == "modules_to_save" and pattern in PART_WORDS:
            found = {name for name, part in names.items() if part == pattern}
        else:
            found = set(filter(matcher(pattern), names))
        if not found:
            raise _no_match(key, pattern, names)
        chosen |= found
    return chosen


def _no_match(key: str, pattern: str, names: Mapping[str, str]) -> ConfigError:
    leaves = sorted({name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2] for name in names})
    return ConfigError(
        f"{key} {pattern} names nothing of the parts that are not frozen: set it to names among {', '.join(leaves)}, or to longer ones"
    )


def _check_saved(saved: set[str], table: NameTable) -> None:
    """Raises: ConfigError: only a part of a matrix of ours would be trained, or what an adapter cannot hold."""
    tied = sorted(saved & set(table.tied.values()))
    if tied:
        raise ConfigError(
            f"modules_to_save: {tied[0]} is also the model's output head (tie_word_embeddings), which PEFT would not store: leave it out"
        )


def apply_plan(plan: LoraPlan, chunks: Sequence[MultimodalGPTModel], table: NameTable, mesh: Mesh) -> None:
    """Freeze all but what the plan trains, and attach adapters, whose factors have no values yet.

    Raises:
        ConfigError: only a part of what is one matrix here would be trained whole.
    """
    for name, parameter in (named for chunk in chunks for named in named_parameters(chunk)):
        sources = set(table.pair([name])[name].sources)
        trained = sources & plan.saved
        if trained and trained != sources:
            raise ConfigError(
                f"modules_to_save names {', '.join(sorted(trained))}, one matrix here with {', '.join(sorted(sources - trained))}: "
                "name all of them or none"
            )
        parameter.requires_grad_(bool(trained))
    for chunk in chunks:
        chunk.saves_frozen = False
    for site in find_sites(chunks, table):
        parts = [layer.rpartition(".")[2] for layer in site.rule.layers() if layer in plan.layers]
        if parts:
            attach(site.module, site.rule, parts, plan.facts, mesh)


def adapter_parameters(chunks: Sequence[MultimodalGPTModel]) -> Iterator[tuple[str, nn.Parameter]]:
    """The factors of adapters, by their names in the whole model."""
    for chunk in chunks:
        yield from ((name, parameter) for name, parameter in named_parameters(chunk) if ADAPTER in name)


@torch.no_grad()
def initialize_adapters(chunks: Sequence[MultimodalGPTModel], table: NameTable, seed: int, place: TensorPlace) -> None:
    """Second factors of zeros; first ones uniform within 1 / sqrt(inputs), as in PEFT, drawn by name: the same in any layout."""
    targets = dict(adapter_parameters(chunks))
    for name, rule in table.pair(list(targets)).items():
        parameter = targets[name]
        if name.endswith("lora_B"):
            parameter.zero_()
            continue
        rank, size = place.of(is_expert=rule.is_expert)
        shape = rule.whole_shape(parameter.shape, size)
        generator = np.random.default_rng([seed, zlib.crc32(rule.sources[0].encode())])
        bound = 1 / sqrt(shape[1])
        whole = torch.from_numpy(generator.uniform(-bound, bound, shape).astype(np.float32))
        parameter.copy_(rule.shard(whole, rank, size))
