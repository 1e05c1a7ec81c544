"""How a checkpoint's tensors pair with the model's parameters: one literal table a family, used in both directions.

Rules only rearrange entries, never compute with them (w - 1 and back is not exact in bfloat16): what is read and written
untrained is equal to the bit. *Source* is a tensor of the checkpoint, *target* a parameter of the model.

Legend: G query groups, Q query heads of a group, D values a head, H hidden size, F feed-forward size, E experts of a layer.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Rule(ABC):
    """Pairs one parameter with the tensors it is made of. `{layer}` in names stands for the number of a decoder layer."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    """The parameter's name; several where layer specs name it differently (a model has one of them)."""
    parallel_dim: int | None = field(default=None, kw_only=True)
    """The parameter's dim that tensor parallelism cuts; None: whole on every rank."""

    is_expert: ClassVar[bool] = False
    """The sources hold the same of all experts of a layer, [E, ...]; older checkpoints have their last two dims swapped."""

    @abstractmethod
    def join(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        """The whole parameter, of `shape`, out of its sources (of what is in `source_slices` of them)."""

    @abstractmethod
    def separate(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The sources out of the whole parameter; the inverse of `join`."""

    def by_source(self, tensor: Tensor) -> dict[str, Tensor]:
        """The same by name, where no source holds more than one parameter."""
        return dict(zip(self.sources, self.separate(tensor), strict=True))

    def part_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of what a parameter of `shape` is separated into."""
        return [tuple(part.shape) for part in self.separate(torch.empty(tuple(shape), device="meta"))]

    def source_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """Shapes of the sources of a whole parameter of `shape`."""
        return self.part_shapes(shape)

    def whole_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """Shape of the whole parameter of which each of `size` tensor-parallel ranks holds `shape`."""
        return tuple(length * size if dim == self.parallel_dim else length for dim, length in enumerate(shape))

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        """What tensor-parallel rank `rank` of `size` holds of the whole parameter."""
        return tensor if self.parallel_dim is None else tensor.chunk(size, self.parallel_dim)[rank]

    def local(self, shape: Sequence[int], rank: int, size: int) -> Self:
        """The rule between what tensor-parallel rank `rank` of `size` holds of the parameter, of `shape`, and its parts of the sources."""
        return self

    def source_slices(self, shape: Sequence[int], rank: int, size: int) -> list[tuple[slice, ...]]:
        """Which part of each source is in what tensor-parallel rank `rank` of `size` holds of the parameter, of `shape`; (): all of it."""
        if self.parallel_dim is None or size == 1:
            return [()] * len(self.sources)
        dim = self.parallel_dim
        own = [part[dim] for part in self.local(shape, rank, size).source_shapes(shape)]
        # No rank has more than the first, and those that have less come last.
        first = [part[dim] for part in self.local(shape, 0, size).source_shapes(shape)]
        starts = [rank * of_first if of_own else 0 for of_first, of_own in zip(first, own, strict=True)]
        return [(*[slice(None)] * dim, slice(start, start + length)) for start, length in zip(starts, own, strict=True)]

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        """The whole parameter out of what each tensor-parallel rank holds; the inverse of `shard`."""
        return shards[0] if self.parallel_dim is None else torch.cat(list(shards), self.parallel_dim)

    def layers(self) -> tuple[str, ...]:
        """Names of the checkpoint's linear layers whose weights are the sources, in their order."""
        return tuple(source.removesuffix(".weight") for source in self.sources)

    def numbered(self, kind: str, number: int) -> Self:
        """The same rule with `{kind}` in its names replaced."""

        def spell_out(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(name.replace(f"{{{kind}}}", str(number)) for name in names)

        return replace(self, sources=spell_out(self.sources), targets=spell_out(self.targets))

    def in_layer(self, layer: int) -> Iterator[Rule]:
        """The rules of one decoder layer."""
        yield self.numbered("layer", layer)


class Direct(Rule):
    """One tensor as it is."""

    def join(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return tensors[0]

    def separate(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)


@dataclass(frozen=True)
class VocabularyRows(Rule):
    """One row a token; the model may have more rows, of zeros, so that they divide. The checkpoint keeps the true number."""

    num_rows: int = field(kw_only=True)

    def local(self, shape: Sequence[int], rank: int, size: int) -> Self:
        return replace(self, num_rows=min(max(self.num_rows - rank * shape[0], 0), shape[0]))

    def join(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        num_padding = shape[0] - self.num_rows
        return F.pad(tensors[0], (0, 0, 0, num_padding)) if num_padding else tensors[0]  # the largest tensor is not copied in vain

    def separate(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor[: self.num_rows],)


@dataclass(frozen=True)
class QueryKeyValue(Rule):
    """Queries [G*Q*D, H], keys and values [G*D, H] each; in the model group by group: [q ... q, k, v] is [(Q+2)*D, H]."""

    num_groups: int = field(kw_only=True)
    head_dim: int = field(kw_only=True)

    def local(self, shape: Sequence[int], rank: int, size: int) -> Self:
        return replace(self, num_groups=self.num_groups // size)

    def join(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return torch.cat([tensor.unflatten(0, (self.num_groups, -1)) for tensor in tensors], dim=1).flatten(0, 1)

    def separate(self, tensor: Tensor) -> tuple[Tensor, ...]:
        groups = tensor.unflatten(0, (self.num_groups, -1))  # [G, (Q+2)*D, H]
        sizes = [groups.size(1) - 2 * self.head_dim, self.head_dim, self.head_dim]
        return tuple(part.flatten(0, 1) for part in groups.split(sizes, dim=1))


@dataclass(frozen=True)
class GatedQueryKeyValue(QueryKeyValue):
    """The same with a gate for each query head, which the checkpoint has behind its query: [q, gate, q, gate, ...] is [G*Q*2*D, H].

    In the model group by group: [q ... q, gate ... gate, k, v] is [(2*Q+2)*D, H].
    """

    def join(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        queries = tensors[0].unflatten(0, (self.num_groups, -1, 2, self.head_dim)).transpose(1, 2).flatten(0, 3)
        return super().join([queries, *tensors[1:]], shape)

    def separate(self, tensor: Tensor) -> tuple[Tensor, ...]:
        queries, *others = super().separate(tensor)
        return queries.unflatten(0, (self.num_groups, 2, -1, self.head_dim)).transpose(1, 2).flatten(0, 3), *others


@dataclass(frozen=True)
class Sections(Rule):
    """Parts one behind the other along the first dim. A tensor-parallel rank holds a share of each.

    A source that holds several of them, in the same order, is named once for each.
    """

    sizes: tuple[int, ...] = field(kw_only=True)
    """Of each part, along the first dim."""

    def join(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return torch.cat(list(tensors))

    def separate(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.split(self.sizes)

    def by_source(self, tensor: Tensor) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {}
        for name, part in zip(self.sources, self.separate(tensor), strict=True):
            parts.setdefault(name, []).append(part)
        return {name: torch.cat(of_name) for name, of_name in parts.items()}

    def local(self, shape: Sequence[int], rank: int, size: int) -> Self:
        return replace(self, sizes=tuple(length // size for length in self.sizes))

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return torch.cat([part.chunk(size)[rank] for part in self.separate(tensor)])

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        local = self.local((), 0, len(shards))
        return torch.cat([part for parts in zip(*map(local.separate, shards), strict=True) for part in parts])

    def source_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        totals = {name: sum(size for source, size in zip(self.sources, self.sizes, strict=True) if source == name) for name in self.sources}
        return [(totals[name], *shape[1:]) for name in self.sources]

    def source_slices(self, shape: Sequence[int], rank: int, size: int) -> list[tuple[slice, ...]]:
        begins: dict[str, int] = dict.fromkeys(self.sources, 0)
        slices: list[tuple[slice, ...]] = []
        for name, whole in zip(self.sources, self.sizes, strict=True):
            start, length = begins[name] + rank * (whole // size), whole // size
            slices.append((slice(start, start + length),))
            begins[name] += whole
        return slices


def _shard_of_halves(tensor: Tensor, rank: int, size: int) -> Tensor:
    """A part of the first half, gate, and one of the second, up."""
    return torch.cat([half.chunk(size)[rank] for half in tensor.chunk(2)])


def _unshard_halves(shards: Sequence[Tensor]) -> Tensor:
    return torch.cat([half for halves in zip(*(shard.chunk(2) for shard in shards), strict=True) for half in halves])


class GateUp(Rule):
    """Gate [F, H] and up [F, H]; in the model [2*F, H], gate first. A tensor-parallel rank holds a part of each."""

    def join(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return torch.cat(list(tensors))

    def separate(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.chunk(2)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return _shard_of_halves(tensor, rank, size)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return _unshard_halves(shards)


@dataclass(frozen=True)
class _EachExpert(Rule):
    """A rule for every expert of a layer. `{expert}` in names stands for the expert's number."""

    num_experts: int = field(kw_only=True)

    is_expert: ClassVar[bool] = True

    def in_layer(self, layer: int) -> Iterator[Rule]:
        in_layer = self.numbered("layer", layer)
        yield from (in_layer.numbered("expert", expert) for expert in range(self.num_experts))


class ExpertDirect(_EachExpert, Direct):
    """One expert's tensor as it is."""


class ExpertGateUp(_EachExpert, GateUp):
    """One expert's gate and up."""


@dataclass(frozen=True)
class FusedExperts(Rule):
    """One expert's matrix out of one tensor of all experts. `{expert}` in targets stands for the expert's number."""

    num_experts: int = field(kw_only=True)
    expert: int = field(kw_only=True, default=0)

    is_expert: ClassVar[bool] = True

    def join(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return tensors[0].squeeze(0)

    def separate(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.unsqueeze(0),)

    def source_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        return [(self.num_experts, *shape)] * len(self.sources)

    def source_slices(self, shape: Sequence[int], rank: int, size: int) -> list[tuple[slice, ...]]:
        rows, columns = (
            slice(rank * length, (rank + 1) * length) if dim == self.parallel_dim else slice(0, length) for dim, length in enumerate(shape)
        )
        return [(self._own, rows, columns)]

    @property
    def _own(self) -> slice:
        return slice(self.expert, self.expert + 1)

    def in_layer(self, layer: int) -> Iterator[Rule]:
        in_layer = self.numbered("layer", layer)
        yield from (replace(in_layer.numbered("expert", expert), expert=expert) for expert in range(self.num_experts))


class FusedGateUpExperts(FusedExperts):
    """One expert's [2*F, H] out of [E, 2*F, H], gate first in both: two parts of one source. A rank holds a part of gate and of up."""

    def join(self, tensors: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
        return torch.cat([part.squeeze(0) for part in tensors])

    def separate(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.unsqueeze(0).chunk(2, dim=1)

    def shard(self, tensor: Tensor, rank: int, size: int) -> Tensor:
        return _shard_of_halves(tensor, rank, size)

    def unshard(self, shards: Sequence[Tensor]) -> Tensor:
        return _unshard_halves(shards)

    def source_slices(self, shape: Sequence[int], rank: int, size: int) -> list[tuple[slice, ...]]:
        length = shape[0] // 2
        starts = (rank * length, (size + rank) * length)
        return [(self._own, slice(start, start + length), slice(0, shape[1])) for start in starts]


ADAPTER = ".adapter."
"""What stands in names of parameters between a linear layer and the factors beside it: `{layer}.adapter.{part}.{lora_A or lora_B}`."""


def adapter_rule(target: str, of_weight: Rule) -> Rule:
    """Of a low-rank factor [R, in] or [out, R], from the rule of the weight that it stands beside; named as PEFT does."""
    part, factor = target.partition(ADAPTER)[2].split(".")
    (layer,) = (layer for layer in of_weight.layers() if layer.rpartition(".")[2] == part)
    cut_with = {"lora_B": 0, "lora_A": 1}[factor]  # the dim of the weight that this factor has
    cut = cut_with if cut_with == of_weight.parallel_dim else None
    return Direct((f"{layer}.{factor}.weight",), (target,), parallel_dim=cut)


@dataclass(frozen=True)
class Prefix:
    """Every parameter under a prefix, as it is: for parts of the model that are the checkpoint's own modules."""

    source: str
    target: str

    def rule(self, target: str) -> Direct:
        return Direct((self.source + target.removeprefix(self.target),), (target,))


@dataclass(frozen=True)
class NameTable:
    """All rules of one family, for one configuration of it."""

    rules: tuple[Rule | Prefix, ...]
    num_layers: int
    tied: Mapping[str, str]
    """Sources that are copies of another one: {copy: original}. They may be stored or not; empty where nothing is tied."""
    base_prefix: str
    """What precedes names in the full model and not in its base model. `transformers` reads either, with or without it."""
    carried: tuple[str, ...] = ()
    """What sources begin with that are no part of the model: they are not read, and exported as they were."""
    zero_centered: tuple[str, ...] = ()
    """What sources end with that are gains of which 1 more is meant than they hold."""
    alternatives: tuple[Rule, ...] = ()
    """For folders that store parameters in another way: rules that stand in place of those for the same targets."""

    def suited(self, stored: Collection[str]) -> NameTable:
        """The table for a folder of these tensors: with the alternatives where it has them."""
        firsts = {rule.numbered("layer", layer).sources[0] for rule in self.alternatives for layer in range(self.num_layers)}
        if not firsts.intersection(stored):
            return self
        replaced = {target for rule in self.alternatives for target in rule.targets}
        kept = (rule for rule in self.rules if isinstance(rule, Prefix) or not replaced.intersection(rule.targets))
        return replace(self, rules=(*kept, *self.alternatives), alternatives=())

    def pair(self, targets: Sequence[str]) -> dict[str, Rule]:
        """The rule of each of the model's parameters, with the names spelled out.

        A parameter that is a tied copy (the head of a last pipeline stage) is made of what it is a copy of.
        """
        by_target = {target: rule for rule in self._numbered_rules() for target in rule.targets}
        prefixes = [rule for rule in self.rules if isinstance(rule, Prefix)]
        weights = {name: f"{name.partition(ADAPTER)[0]}.weight" for name in targets if ADAPTER in name}
        whole = {*targets, *weights.values()}
        by_target |= {name: prefix.rule(name) for prefix in prefixes for name in whole if name.startswith(prefix.target)}
        by_target |= {name: adapter_rule(name, by_target[weight]) for name, weight in weights.items()}
        unpaired = [target for target in targets if target not in by_target]
        assert not unpaired, f"the name table has no rule for {unpaired}"
        return {target: self._untied(by_target[target]) for target in targets}

    def to_sources(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole parameters, or their gradients, of all the model as the checkpoint's tensors."""
        sources: dict[str, Tensor] = {}
        for target, rule in self.pair(list(tensors)).items():
            tensor = tensors[target]
            shapes, slices = rule.source_shapes(tensor.shape), rule.source_slices(tensor.shape, 0, 1)
            for name, shape, index, part in zip(rule.sources, shapes, slices, rule.separate(tensor), strict=True):
                if name not in sources:
                    sources[name] = part.new_empty(shape) if index else part
                if index:
                    sources[name][index] = part
        return sources

    def _untied[T: Rule](self, rule: T) -> T:
        sources = tuple(self.tied.get(source, source) for source in rule.sources)
        return rule if sources == rule.sources else replace(rule, sources=sources)

    def _numbered_rules(self) -> Iterator[Rule]:
        for rule in self.rules:
            if isinstance(rule, Rule) and "{layer}" in rule.sources[0]:
                yield from itertools.chain.from_iterable(rule.in_layer(layer) for layer in range(self.num_layers))
            elif isinstance(rule, Rule):
                yield rule

    def is_carried(self, source: str) -> bool:
        return bool(self.carried) and source.startswith(self.carried)

    def canonical_name(self, stored: str, sources: set[str]) -> str:
        """The name in this table of a tensor stored under today's or an older name; `stored` itself where there is none."""
        candidates = [stored, self.base_prefix + stored]
        if stored.startswith(self.base_prefix):
            candidates.append(stored.removeprefix(self.base_prefix))
        return next((name for name in candidates if name in sources or name in self.tied), stored)
