"""Rules about adapters, and what follows from a folder that holds one."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from swiftcp.config.case import Case, Finding, Rule
from swiftcp.config.concern import Concern
from swiftcp.config.concerns import FreezeConfig, OptimizerConfig, ParityConfig
from swiftcp.config.resolved import ResolvedConfig
from swiftcp.config.tuner import ALL_LINEAR, AdapterConfig, TunerConfig, read_adapter_facts
from swiftcp.errors import ConfigError

LORA_LR = 1e-4
LORA_KEYS = (
    *("lora_rank", "lora_alpha", "lora_dropout", "use_rslora"),
    *("target_modules", "target_regex", "modules_to_save", "merge_lora"),
)


def tuner_defaults[C: Concern](resolved: ResolvedConfig[C]) -> Iterator[tuple[str, object, str]]:
    """Of LoRA: its learning rate, and what the adapter that training goes on from says. A folder that says nothing breaks a rule."""
    config, origins = resolved.config, resolved.origins
    if not isinstance(config, TunerConfig) or config.tuner_type != "lora":
        return
    if isinstance(config, OptimizerConfig) and origins["lr"].level == "default":
        yield "lr", LORA_LR, "tuner_type is lora"
    if isinstance(config, AdapterConfig) and config.adapters:
        try:
            keys = read_adapter_facts(Path(config.adapters)).as_keys()
        except ConfigError:
            return
        yield from ((key, value, "what adapters says") for key, value in keys.items() if origins[key].level == "default")


def _adapters(case: Case) -> Iterator[Finding]:
    config = case.config
    if not case.has(AdapterConfig) or not config.adapters:
        return
    try:
        facts = read_adapter_facts(Path(config.adapters))
    except ConfigError as error:
        yield "adapters", str(error)
        return
    if isinstance(config, ParityConfig) and importlib.util.find_spec("peft") is None:
        yield "adapters", "adapters: parity compares them with PEFT's, which is not installed: install it (pip install peft)"
    if not case.has(TunerConfig):
        return
    if config.tuner_type != "lora":
        yield "adapters", "adapters needs tuner_type lora: set that, or merge the adapter first (swiftcp export --merge_lora true)"
        return
    for key in ("lora_rank", "lora_alpha", "use_rslora"):
        if (value := getattr(config, key)) != (there := facts.as_keys()[key]):
            yield key, f"{key} {value} is not that of adapters {config.adapters}, {there}: leave it out"
    for key in ("target_modules", "target_regex", "modules_to_save", *(f"freeze_{part}" for part in ("llm", "vit", "aligner"))):
        if case.given(key):
            yield key, f"{key}: what is trained is what adapters {config.adapters} holds: leave it out"


def _lora(case: Case) -> Iterator[Finding]:
    config = case.config
    if not case.has(TunerConfig) or config.tuner_type != "lora":
        return
    if config.target_regex is not None:
        try:
            re.compile(config.target_regex)
        except re.error as error:
            yield "target_regex", f"target_regex {config.target_regex} is no regular expression ({error})"
        if case.given("target_modules"):
            yield "target_regex", "target_regex and target_modules both say which layers get an adapter: keep one"
    if ALL_LINEAR in config.target_modules and len(config.target_modules) > 1:
        yield "target_modules", f"target_modules {' '.join(config.target_modules)}: {ALL_LINEAR} stands alone"
    for part in ("vit", "aligner"):
        if part in config.modules_to_save and case.has(FreezeConfig) and getattr(config, f"freeze_{part}"):
            yield "modules_to_save", f"modules_to_save {part}, but freeze_{part} is true: set that false"


def _warn_without_effect(case: Case) -> Iterator[Finding]:
    if case.has(TunerConfig) and case.config.tuner_type != "lora":
        for key in LORA_KEYS:
            if case.given(key):
                yield key, f"{key} has no effect with tuner_type {case.config.tuner_type}"


TUNER_RULES: tuple[Rule, ...] = (_adapters, _lora)
TUNER_WARNINGS: tuple[Rule, ...] = (_warn_without_effect,)
