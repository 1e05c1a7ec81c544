"""Rules about the parallel layout: how many ranks it takes, and what of the model it must divide."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, lcm, prod

from swiftcp.config.case import Case, Finding, Rule, round_up
from swiftcp.config.concerns import TrainingConfig


def _world(case: Case) -> Iterator[Finding]:
    if case.data_parallel_size is not None:
        return
    config, world_size = case.config, case.machine.world_size
    sizes = {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
        "context_parallel_size": config.context_parallel_size,
    }
    product = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1)
    key = next(key for key in reversed(sizes) if sizes[key] > 1)
    yield (
        key,
        f"world {world_size} is no multiple of {product}{f' = {config.model_parallel_size}' if ' x ' in product else ''}: start "
        f"{round_up(world_size, config.model_parallel_size)} ranks (nproc_per_node), or set sizes whose product divides {world_size}",
    )


def _tensor_parallel(case: Case) -> Iterator[Finding]:
    """Each rank has the same number of heads and of feed-forward columns."""
    tp, facts = case.config.tensor_model_parallel_size, case.facts
    if facts is None:
        return
    divisor = gcd(facts.num_attention_heads, facts.num_key_value_heads, facts.intermediate_size)
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if (size := getattr(facts, name)) % tp:
            yield (
                "tensor_model_parallel_size",
                f"{name} {size} of the model is no multiple of tensor_model_parallel_size {tp}: set it to a divisor of {divisor}",
            )


def _experts(case: Case) -> Iterator[Finding]:
    """Each rank holds the same number of experts, and the same number of columns of each."""
    config, facts = case.config, case.facts
    sizes = {key: getattr(config, key) for key in ("expert_model_parallel_size", "expert_tensor_parallel_size")}
    if facts is None:
        return
    if not facts.num_experts:
        yield from ((key, f"{key} {size}, but the model has no experts: leave it out") for key, size in sizes.items() if size > 1)
        return
    divided = {"num_experts": "expert_model_parallel_size", "moe_intermediate_size": "expert_tensor_parallel_size"}
    for name, key in divided.items():
        if (total := getattr(facts, name)) % sizes[key]:
            yield key, f"{name} {total} of the model is no multiple of {key} {sizes[key]}: set it to a divisor of {total}"
    world_size = case.machine.world_size
    if world_size % config.expert_parallel_size:
        yield (
            "expert_model_parallel_size",
            f"world {world_size} is no multiple of pp {config.pipeline_model_parallel_size} x ep {sizes['expert_model_parallel_size']} x "
            f"etp {sizes['expert_tensor_parallel_size']} = {config.expert_parallel_size}: start "
            f"{round_up(world_size, config.fewest_ranks)} ranks (nproc_per_node), or set sizes whose product divides it",
        )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        yield (
            "sequence_parallel",
            f"experts with tensor_model_parallel_size {config.tensor_model_parallel_size} need each token on one rank: "
            "set sequence_parallel true",
        )


def _heads(case: Case) -> Iterator[Finding]:
    """a2a spreads the heads of a tensor-parallel rank over the ranks of a context-parallel group, or of its inner part."""
    config, facts = case.config, case.facts
    if "a2a" not in config.cp_comm_type or facts is None or _hierarchical_problem(case):
        return
    hierarchical = config.cp_comm_type == "a2a+p2p"
    spread = config.hierarchical_context_parallel_sizes[0] if hierarchical else config.context_parallel_size
    tp = config.tensor_model_parallel_size
    divisor = gcd(facts.num_attention_heads, facts.num_key_value_heads)
    sizes = f"tensor_model_parallel_size {tp} x " if tp > 1 else ""
    key = "hierarchical_context_parallel_sizes" if hierarchical else "context_parallel_size"
    for name in ("num_attention_heads", "num_key_value_heads"):
        if (num_heads := getattr(facts, name)) % (tp * spread):
            yield (
                key,
                f"{name} {num_heads} of the model is no multiple of {sizes}{key} {spread}, as cp_comm_type {config.cp_comm_type} needs: "
                f"set cp_comm_type p2p, or sizes whose product is a divisor of {divisor}",
            )


def _delta_net(case: Case) -> Iterator[Finding]:
    """A rank of both groups computes some heads of a gated delta net over whole sequences."""
    config, facts = case.config, case.facts
    if facts is None or not (num_heads := facts.linear_num_key_heads):
        return
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    if num_heads % (tp * cp):
        key = "context_parallel_size" if cp > 1 else "tensor_model_parallel_size"
        yield (
            key,
            f"linear_num_key_heads {num_heads} of the model is no multiple of tensor_model_parallel_size {tp} x context_parallel_size {cp}:"
            f" set sizes whose product is a divisor of {num_heads}, for their ranks share the heads of gated delta nets",
        )


def _hierarchical_problem(case: Case) -> str | None:
    config = case.config
    sizes, cp = config.hierarchical_context_parallel_sizes, config.context_parallel_size
    if config.cp_comm_type != "a2a+p2p":
        return None
    if sizes is None:
        return "cp_comm_type a2a+p2p needs the size of the inner (a2a) and the outer (p2p) groups"
    if len(sizes) != 2 or prod(sizes) != cp:
        return f"hierarchical_context_parallel_sizes {sizes} are not two sizes whose product is context_parallel_size {cp}"
    return None


def _hierarchical(case: Case) -> Iterator[Finding]:
    if problem := _hierarchical_problem(case):
        cp = case.config.context_parallel_size
        yield "cp_comm_type", f"{problem}: set hierarchical_context_parallel_sizes to two sizes, as [2, {max(cp // 2, 1)}]"


def _layers_of_stages(case: Case) -> list[int] | None:
    """Decoder layers of each pipeline stage; None where they do not divide (or the model is not known)."""
    config, facts = case.config, case.facts
    if facts is None:
        return None
    ends = [config.decoder_first_pipeline_num_layers, config.decoder_last_pipeline_num_layers]
    num_stages, num_layers = config.pipeline_model_parallel_size, facts.num_hidden_layers
    inner = num_stages - sum(end is not None for end in ends)
    rest = num_layers - sum(end or 0 for end in ends)
    if rest < inner or (inner == 0 and rest) or (inner and rest % inner):
        return None
    layers = [rest // inner if inner else 0] * num_stages
    for stage, end in zip((0, -1), ends, strict=True):
        if end is not None:
            layers[stage] = end
    return layers


def _pipeline(case: Case) -> Iterator[Finding]:
    config, facts = case.config, case.facts
    num_stages, num_chunks = config.pipeline_model_parallel_size, config.virtual_pipeline_model_parallel_size
    for key in ("virtual_pipeline_model_parallel_size", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"):
        if (value := getattr(config, key)) is not None and num_stages == 1:
            yield key, f"{key} {value} needs pipeline stages, but pipeline_model_parallel_size is 1: set that to 2 or more, or leave it out"
            return
    if facts is None or num_stages == 1:
        return
    layers = _layers_of_stages(case)
    if layers is None:
        yield (
            "pipeline_model_parallel_size",
            f"num_hidden_layers {facts.num_hidden_layers} of the model do not spread evenly over pipeline_model_parallel_size {num_stages}:"
            " set decoder_first_pipeline_num_layers and decoder_last_pipeline_num_layers, so that what is left divides by the other stages",
        )
        return
    uneven = [stage for stage in layers if stage % (num_chunks or 1)]
    if uneven:
        yield (
            "virtual_pipeline_model_parallel_size",
            f"a pipeline stage of {uneven[0]} layers is no multiple of virtual_pipeline_model_parallel_size {num_chunks}: set a divisor",
        )
        return
    first = layers[0] // (num_chunks or 1)
    if first < facts.num_deepstack_levels:
        needed = facts.num_deepstack_levels
        yield (
            "pipeline_model_parallel_size",
            f"the first pipeline stage's first chunk has {first} layers, but visual features enter the first {needed} layers of the model "
            f"(deepstack), which must be in that chunk: set decoder_first_pipeline_num_layers to {needed * (num_chunks or 1)} or more, or "
            "fewer stages",
        )


def _micro_batches_of_chunks(case: Case) -> Iterator[Finding]:
    config, dp = case.config, case.data_parallel_size
    if config.virtual_pipeline_model_parallel_size is None or dp is None or not case.has(TrainingConfig):
        return
    num_micro_batches, rest = divmod(config.global_batch_size, config.micro_batch_size * dp)
    num_stages = config.pipeline_model_parallel_size
    if not rest and num_micro_batches % num_stages:
        yield (
            "global_batch_size",
            f"global_batch_size {config.global_batch_size} is {num_micro_batches} micro-batches of a rank, no multiple of "
            f"pipeline_model_parallel_size {num_stages}, as virtual_pipeline_model_parallel_size needs: set "
            f"{round_up(config.global_batch_size, num_stages * config.micro_batch_size * dp)}",
        )


def _packs_of_sequence_parallel(case: Case) -> Iterator[Finding]:
    """A pack's end is padded until tensor-parallel ranks share it evenly; a pack of the full length has no room for that."""
    config = case.config
    length = getattr(config, "packing_length", None)
    if not config.sequence_parallel or not getattr(config, "packing", False) or not length:
        return
    multiple = lcm(config.pack_align, case.two_cp, config.context_parallel_size * config.tensor_model_parallel_size)
    if length % multiple:
        key = "packing_length" if case.given("packing_length") else "max_length"
        yield (
            key,
            f"packing_length {length} does not spread evenly over tensor_model_parallel_size {config.tensor_model_parallel_size} x "
            f"context_parallel_size {config.context_parallel_size} with sequence_parallel and pack_align {config.pack_align}: set "
            f"{key} {round_up(length, multiple)}",
        )


LAYOUT_RULES: tuple[Rule, ...] = (
    _world,
    _tensor_parallel,
    _experts,
    _hierarchical,
    _heads,
    _delta_net,
    _pipeline,
    _micro_batches_of_chunks,
    _packs_of_sequence_parallel,
)


def _warn_without_effect(case: Case) -> Iterator[Finding]:
    config = case.config
    if config.sequence_parallel and config.tensor_model_parallel_size == 1:
        yield "sequence_parallel", "sequence_parallel has no effect with tensor_model_parallel_size 1"
    if config.hierarchical_context_parallel_sizes is not None and config.cp_comm_type != "a2a+p2p":
        yield "hierarchical_context_parallel_sizes", "hierarchical_context_parallel_sizes has no effect without cp_comm_type a2a+p2p"
    if case.given("cp_partition_mode") and config.cp_partition_mode != "zigzag":
        without = "context_parallel_size 1" if config.context_parallel_size == 1 else "packing false: each row is cut"
        if config.context_parallel_size == 1 or not getattr(config, "packing", True):
            yield "cp_partition_mode", f"cp_partition_mode {config.cp_partition_mode} has no effect with {without}"
    if case.facts and not case.facts.num_experts:
        keys = ("moe_router_dtype", "moe_aux_loss_coeff", "moe_z_loss_coeff")
        yield from ((key, f"{key} has no effect: the model has no experts") for key in keys if hasattr(config, key) and case.given(key))


TESTED = frozenset(
    frozenset(axes.split())
    for axes in (
        *("", "dp", "cp", "cp dp", "tp", "tp sp", "tp sp cp", "tp sp dp", "tp sp pp", "pp", "pp cp", "pp dp", "pp vpp", "pp vpp cp"),
        *("ep dp", "ep cp", "ep tp sp", "etp tp sp", "ep cp pp", "ep etp cp tp sp"),
    )
)
"""Combinations that the tests compare with one rank; the table of docs/layouts.md."""


def axes_in_use(case: Case) -> frozenset[str]:
    """What of a layout is more than one, or on."""
    config = case.config
    used = {
        "tp": config.tensor_model_parallel_size > 1,
        "sp": config.sequence_parallel and config.tensor_model_parallel_size > 1,
        "cp": config.context_parallel_size > 1,
        "dp": (case.data_parallel_size or 1) > 1,
        "pp": config.pipeline_model_parallel_size > 1,
        "vpp": config.virtual_pipeline_model_parallel_size is not None,
        "ep": config.expert_model_parallel_size > 1,
        "etp": config.expert_tensor_parallel_size > 1,
    }
    return frozenset(axis for axis, is_used in used.items() if is_used)


def _warn_untested(case: Case) -> Iterator[Finding]:
    used = axes_in_use(case)
    if used not in TESTED:
        axes = {"tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}
        key = next((key for axis, key in axes.items() if axis in used), "expert_tensor_parallel_size")
        yield key, f"{' + '.join(sorted(used))} together are not among the layouts that are tested: check yours with swiftcp parity"


LAYOUT_WARNINGS: tuple[Rule, ...] = (_warn_without_effect, _warn_untested)


def describe_layout(case: Case) -> str:
    """`world 8 = tp 2 x cp 4 x dp 1`: axes of size 1 are left out but for cp and dp."""
    config = case.config
    sizes = {"tp": config.tensor_model_parallel_size, "pp": config.pipeline_model_parallel_size}
    axes = [f"{axis} {size}" for axis, size in sizes.items() if size > 1]
    axes += [f"cp {config.context_parallel_size}", f"dp {case.data_parallel_size}"]
    experts = {"ep": config.expert_model_parallel_size, "etp": config.expert_tensor_parallel_size}
    spread = " x ".join(f"{axis} {size}" for axis, size in experts.items() if size > 1)
    return f"world {case.machine.world_size} = {' x '.join(axes)}" + (f", experts over {spread}" if spread else "")
