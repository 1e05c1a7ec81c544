"""LoRA: low-rank factors beside linear layers, whose own weights are frozen.

Hu et al. 2021, https://arxiv.org/abs/2106.09685. The checkpoint's linear layers are what users name and PEFT stores: each has its own
pair of factors, also where one matrix of ours holds several of them (queries, keys and values; gate and up). Those are computed
together, and the rule that joins their weights joins what is added to them.

Under tensor parallelism one factor of a pair is cut like the weight, and the other is whole on every rank. Its gradient is made whole
by collectives over R values a token: for what it is followed by (column-parallel: the sum over ranks of the gradient of x A^T, or the
gather of the sequence) or preceded by (row-parallel: the sum of x A^T). With sequence parallelism a rank's whole factor sees its own
tokens alone, and megatron-core sums the gradients, as it does for norms.

Legend: S local tokens (between matrices S / TP under sequence parallelism), B rows, I and O inputs and outputs of a layer on this rank,
R rank, P checkpoint's layers of one matrix that have factors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.utils import make_sharded_tensor_for_checkpoint, make_tp_sharded_tensor_for_checkpoint
from torch import Tensor, nn

from swiftcp.checkpoint.name_table import Rule
from swiftcp.config.tuner import AdapterFacts
from swiftcp.parallel.mesh import Mesh


class Factors(nn.Module):
    """The pair of one layer of the checkpoint: lora_A [R, I] and lora_B [O, R]."""

    def __init__(self, rank: int, num_inputs: int, num_outputs: int, weight: Tensor) -> None:
        super().__init__()
        self.lora_A = nn.Parameter(weight.new_empty(rank, num_inputs))
        self.lora_B = nn.Parameter(weight.new_empty(num_outputs, rank))


class Adapter(nn.Module):
    """What is added to the output of a linear layer that is whole on this rank; see the subclasses for those that are not."""

    def __init__(self, weight: Tensor, rule: Rule, parts: Collection[str], facts: AdapterFacts) -> None:
        """
        Args:
            weight: [O, I] of the linear layer.
            rule: between `weight` and the weights that it is joined of.
            parts: last components of the names of the checkpoint's layers that get factors.
        """
        super().__init__()
        self.rule, self.facts, self.shape = rule, facts, tuple(weight.shape)
        self.num_outputs = {
            layer.rpartition(".")[2]: shape[0] for layer, shape in zip(rule.layers(), rule.part_shapes(weight.shape), strict=True)
        }
        for part, num_outputs in self.num_outputs.items():
            if part in parts:
                self.add_module(part, Factors(facts.rank, weight.size(1), num_outputs, weight))
        for parameter in self.parameters():
            for flag in ("average_gradients_across_tp_domain", "allreduce"):
                if hasattr(weight, flag):
                    setattr(parameter, flag, getattr(weight, flag))

    @property
    def factors(self) -> Mapping[str, Any]:
        """By the last component of the layer's name, in the order of their outputs."""
        return dict(self.named_children())

    def forward(self, inputs_SBI: Tensor) -> Tensor:
        """[S, B, O]."""
        lower_KI = torch.cat([factors.lora_A for factors in self.factors.values()])  # K = P x R
        hidden_SBK = self.exchange(F.linear(self.drop(inputs_SBI), lower_KI))
        return F.linear(hidden_SBK, self.facts.scaling * self.raising())

    def drop(self, inputs_SBI: Tensor) -> Tensor:
        """Dropout where all tensor-parallel ranks have the same inputs: the default generator is in the same state on all of them."""
        return F.dropout(inputs_SBI, self.facts.dropout, self.training)

    def exchange(self, hidden_SBK: Tensor) -> Tensor:
        """What ranks tell each other between the two products."""
        return hidden_SBK

    def raising(self) -> Tensor:
        """[O, P x R]: the second factors, each beside zeros where the others' hidden values are."""
        width, rank, used = len(self.factors) * self.facts.rank, self.facts.rank, 0
        blocks = []
        for part, num_outputs in self.num_outputs.items():
            if part in self.factors:
                blocks.append(F.pad(self.factors[part].lora_B, (used, width - used - rank)))
                used += rank
            else:
                blocks.append(self._zeros(num_outputs, width))
        return self.rule.join(blocks, (self.shape[0], width))

    def _zeros(self, *shape: int) -> Tensor:
        return next(self.parameters()).new_zeros(shape)

    def sharded(self, prefix: str, key: str, tp_group: dist.ProcessGroup, dp_cp_group: dist.ProcessGroup) -> dict[str, ShardedTensor]:
        """For a resumable checkpoint: the factors by `prefix` and their names, kept under `key`, which no layout changes."""
        groups = {"tp_group": tp_group, "dp_cp_group": dp_cp_group}
        found = {}
        for name, parameter in self.named_parameters():
            cut_dim = parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None  # type: ignore[attr-defined]
            if cut_dim is None:
                found[prefix + name] = make_sharded_tensor_for_checkpoint(parameter, key + name, **groups)
            else:
                found[prefix + name] = make_tp_sharded_tensor_for_checkpoint(parameter, key + name, tp_axis=cut_dim, **groups)
        return found

    @torch.no_grad()
    def weight_delta(self) -> Tensor:
        """[O, I] float32: what the adapter comes to as a change of the layer's weight."""
        blocks = [
            self.factors[part].lora_B.float() @ self.factors[part].lora_A.float()
            if part in self.factors
            else self._zeros(num_outputs, self.shape[1]).float()
            for part, num_outputs in self.num_outputs.items()
        ]
        return self.facts.scaling * self.rule.join(blocks, self.shape)


class _CutAdapter(Adapter):
    """Beside a matrix that tensor-parallel ranks share."""

    whole: str
    """The factor that every rank has whole."""
    cut_dim: int
    """Of the other factor."""

    def __init__(self, weight: Tensor, rule: Rule, parts: Collection[str], facts: AdapterFacts, mesh: Mesh) -> None:
        super().__init__(weight, rule, parts, facts)
        self.group: dist.ProcessGroup = mesh.tp_group
        self.sequence_parallel = mesh.sequence_parallel
        for name, parameter in self.named_parameters():
            if name.endswith(self.whole):
                parameter.sequence_parallel = mesh.sequence_parallel  # type: ignore[attr-defined]
            else:
                set_tensor_model_parallel_attributes(parameter, True, self.cut_dim, 1)

    def _drop_differently(self, inputs_SBI: Tensor) -> Tensor:
        """Dropout where each tensor-parallel rank has inputs of its own."""
        if not self.facts.dropout or not self.training:
            return inputs_SBI
        with get_cuda_rng_tracker().fork():
            return F.dropout(inputs_SBI, self.facts.dropout)


class ColumnParallelAdapter(_CutAdapter):
    """Beside a matrix whose outputs are cut."""

    whole, cut_dim = "lora_A", 0

    def drop(self, inputs_SBI: Tensor) -> Tensor:
        return self._drop_differently(inputs_SBI) if self.sequence_parallel else super().drop(inputs_SBI)

    def exchange(self, hidden_SBK: Tensor) -> Tensor:
        if self.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden_SBK, tensor_parallel_output_grad=True, group=self.group)
        return copy_to_tensor_model_parallel_region(hidden_SBK, group=self.group)


class RowParallelAdapter(_CutAdapter):
    """Beside a matrix whose inputs are cut."""

    whole, cut_dim = "lora_B", 1

    def drop(self, inputs_SBI: Tensor) -> Tensor:
        return self._drop_differently(inputs_SBI)

    def exchange(self, hidden_SBK: Tensor) -> Tensor:
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(hidden_SBK, group=self.group)
        return reduce_from_tensor_model_parallel_region(hidden_SBK, group=self.group)


def _add(module: Any, inputs: tuple[Tensor, ...], output: Any) -> Any:
    """Of a linear layer of torch, which returns its output, or of megatron-core, which returns it with a bias that is still to add."""
    added = module.adapter(inputs[0])
    return (output[0] + added, *output[1:]) if isinstance(output, tuple) else output + added


def attach(module: nn.Module, rule: Rule, parts: Collection[str], facts: AdapterFacts, mesh: Mesh) -> None:
    """Let a linear layer add what an adapter makes of its inputs. The factors have no values yet.

    Args:
        rule: of the whole weight.
    """
    weight: Tensor = module.weight  # type: ignore[assignment]
    local = rule.local(weight.shape, mesh.tp_rank, mesh.tp_size)
    if rule.parallel_dim is None:
        adapter = Adapter(weight, local, parts, facts)
    else:
        kind = ColumnParallelAdapter if rule.parallel_dim == 0 else RowParallelAdapter
        adapter = kind(weight, local, parts, facts, mesh)
    module.adapter = adapter
    module.adapter_handle = module.register_forward_hook(_add)  # type: ignore[assignment]


def adapted(chunks: Sequence[nn.Module]) -> list[nn.Module]:
    """The linear layers that have an adapter."""
    return [module for chunk in chunks for module in chunk.modules() if isinstance(getattr(module, "adapter", None), Adapter)]


@torch.no_grad()
def merge_adapters(chunks: Sequence[nn.Module]) -> int:
    """Add every adapter to its layer's weight, in float32, and take it away. Returns how many there were."""
    layers: list[Any] = adapted(chunks)
    for layer in layers:
        layer.weight.copy_(layer.weight.float() + layer.adapter.weight_delta())
        layer.adapter_handle.remove()
        del layer.adapter, layer.adapter_handle
    return len(layers)
