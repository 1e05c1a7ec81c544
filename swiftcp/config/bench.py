"""`swiftcp bench`: what can be configured, and its rules across keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from swiftcp.config.case import Case, Finding, round_up
from swiftcp.config.checks import BENCH_RULES, check
from swiftcp.config.concerns import (
    Concern,
    FreezeConfig,
    OptimizerConfig,
    ParallelConfig,
    PathText,
    RecomputeConfig,
    RouterConfig,
    RouterLossConfig,
    RuntimeConfig,
)
from swiftcp.config.defaults import fill_defaults
from swiftcp.config.facts import Machine, ModelFacts
from swiftcp.config.layout_checks import describe_layout
from swiftcp.config.resolved import ResolvedConfig

MARKERS = 2
"""Tokens around an image: its start and its end."""


class WorkConfig(Concern):
    """What is computed: a model of random weights, and packs of random tokens and images."""

    panel = "Work"

    shape: PathText = "qwen3_vl_2b"
    """A public model by name (qwen3_vl_2b, _4b, _8b, _32b, _30b_a3b, _235b_a22b), or the config.json of any; weights are random."""
    torch_dtype: Literal["bfloat16", "float32"] | None = None
    """Number format of weights and activations. Default: bfloat16 on CUDA, float32 on a CPU."""
    num_tokens: PositiveInt = 32768
    """Tokens of a pack, those of images included."""
    num_sequences: PositiveInt = 1
    """Samples of a pack, equally long."""
    num_images: NonNegativeInt = 0
    """Images of a pack, spread over its samples."""
    image_tokens: PositiveInt = 1024
    """Tokens of each image."""
    num_packs: PositiveInt = 1
    """Packs of each rank (of each context-parallel group) in one step."""
    num_steps: PositiveInt = 10
    """Optimizer steps that are measured."""
    num_warmup_steps: NonNegativeInt = 3
    """Optimizer steps before those."""
    profile: bool = False
    """List the kernels that took most time in one more step."""


class BenchConfig(
    WorkConfig, FreezeConfig, OptimizerConfig, ParallelConfig, RouterConfig, RouterLossConfig, RecomputeConfig, RuntimeConfig
):
    """`swiftcp bench`."""


def _sequences(case: Case) -> Iterator[Finding]:
    config = case.config
    shares = config.context_parallel_size * config.tensor_model_parallel_size if config.sequence_parallel else 1
    multiple = lcm(config.num_sequences * case.two_cp, shares)
    for reason, divisor in {
        f"num_sequences {config.num_sequences} x 2*CP": config.num_sequences * case.two_cp,
        "CP x TP, as sequence_parallel needs,": shares,
    }.items():
        if config.num_tokens % divisor:
            yield (
                "num_tokens",
                f"num_tokens {config.num_tokens} is no multiple of {reason} = {divisor}: set {round_up(config.num_tokens, multiple)}",
            )
    num_images = -(-config.num_images // config.num_sequences)
    least = config.num_sequences * (num_images * (config.image_tokens + MARKERS + 1) + 1)
    if config.num_tokens < least:
        yield (
            "num_images",
            f"num_images {config.num_images} of image_tokens {config.image_tokens} in {config.num_sequences} samples do not fit "
            f"num_tokens {config.num_tokens}: set num_tokens to {round_up(least, multiple)} or more",
        )


def _packs_of_chunks(case: Case) -> Iterator[Finding]:
    num_packs, num_stages = case.config.num_packs, case.config.pipeline_model_parallel_size
    if case.config.virtual_pipeline_model_parallel_size is not None and num_packs % num_stages:
        yield (
            "num_packs",
            f"num_packs {num_packs} is no multiple of pipeline_model_parallel_size {num_stages}, as virtual_pipeline_model_parallel_size "
            f"needs: set {round_up(num_packs, num_stages)}",
        )


def validate_bench(resolved: ResolvedConfig[BenchConfig], machine: Machine, facts: ModelFacts) -> ResolvedConfig[BenchConfig]:
    """Fill in the defaults that depend on the machine, and check every rule across keys.

    Raises:
        ConfigError: rules are broken; all of them in one error.
    """
    full = fill_defaults(resolved, machine, facts)
    if full.config.torch_dtype is None:
        dtype = "bfloat16" if full.config.device == "cuda" else "float32"
        full = full.with_defaults({"torch_dtype": (dtype, f"device is {full.config.device}")})
    case = Case(full.config, dict(full.origins), machine, facts)
    check((*BENCH_RULES, _sequences, _packs_of_chunks), case)
    return replace(full, derived=(describe_layout(case),))
