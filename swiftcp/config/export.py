"""`swiftcp export`: what can be configured, and its rules across keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from swiftcp.config.case import Case, Finding
from swiftcp.config.checks import EXPORT_RULES, check, not_replaceable, writable
from swiftcp.config.concerns import Concern, ParallelConfig, PathText, RuntimeConfig
from swiftcp.config.defaults import fill_defaults
from swiftcp.config.facts import Machine, ModelFacts, read_model_facts
from swiftcp.config.layout_checks import describe_layout
from swiftcp.config.paths import CHECKPOINTS_FOLDER, MARKER_FILE, STATE_FILE, missing
from swiftcp.config.resolved import ResolvedConfig
from swiftcp.errors import ConfigError


class ExportedConfig(Concern):
    """What is exported, and where to."""

    panel = "Export"

    checkpoint: PathText
    """A checkpoint of a run, of any layout: output_dir/checkpoints/step-NNNNNN."""
    output: PathText
    """Hugging Face folder to write; a model that is there is replaced."""
    model: PathText | None = None
    """Hugging Face folder that the run began from: names, number formats, tokenizer, processor. Default: what the checkpoint says."""
    merge_lora: bool = False
    """Of a run with adapters: write the merged model; false: the adapter, in PEFT's format."""


class ExportConfig(ExportedConfig, ParallelConfig, RuntimeConfig):
    """`swiftcp export`."""


def _saved(checkpoint: Path, key: str) -> str | None:
    """A key of the recipe of a checkpoint's run; None where it does not say."""
    try:
        return str(json.loads((checkpoint / STATE_FILE).read_text(encoding="utf-8"))["fingerprint"][key])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _checkpoint(case: Case) -> Iterator[Finding]:
    checkpoint = Path(case.config.checkpoint)
    if not checkpoint.exists():
        yield "checkpoint", missing("checkpoint", checkpoint)
    elif not (checkpoint / MARKER_FILE).is_file():
        inside = sorted(marker.parent for marker in checkpoint.glob(f"**/step-*/{MARKER_FILE}"))
        like = inside[-1] if inside else Path(CHECKPOINTS_FOLDER) / "step-000500"
        yield (
            "checkpoint",
            f"checkpoint {checkpoint} is no complete checkpoint, for it holds no {MARKER_FILE}: set checkpoint to a folder like {like}",
        )
    elif case.config.model is None:
        yield "checkpoint", f"checkpoint {checkpoint} does not say which model it began from: set model to that folder"
    elif case.config.merge_lora and _saved(checkpoint, "tuner_type") != "lora":
        yield "merge_lora", f"merge_lora true, but checkpoint {checkpoint} is not of a run with tuner_type lora: leave it out"


def _output(case: Case) -> Iterator[Finding]:
    output = Path(case.config.output)
    yield from writable("output", output)
    if case.config.model is not None:
        yield from not_replaceable("output", f"output {output}", output, Path(case.config.model))


def validate_export(resolved: ResolvedConfig[ExportConfig], machine: Machine) -> ResolvedConfig[ExportConfig]:
    """Fill in the model that the checkpoint names and the defaults of the machine, and check every rule across keys.

    Raises:
        ConfigError: rules are broken; all of them in one error.
    """
    checkpoint = Path(resolved.config.checkpoint)
    remedy = ""
    if resolved.config.model is None and (model := _saved(checkpoint, "model")):
        resolved = resolved.with_defaults({"model": (model, "what the checkpoint began from")})
        remedy = ": set model to where the folder is now"
    facts: ModelFacts | None = None
    problems: list[str] = []
    if resolved.config.model is not None:
        try:
            facts = read_model_facts(Path(resolved.config.model))
        except ConfigError as error:
            problems.append(f"{error}{remedy} [{resolved.origins['model']}]")
    full = fill_defaults(resolved, machine, facts)
    case = Case(full.config, dict(full.origins), machine, facts)
    check((_checkpoint, _output, *EXPORT_RULES), case, problems)
    return replace(full, derived=(describe_layout(case),))
