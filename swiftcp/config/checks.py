"""Rules across keys. Each names rule, value and remedy; `validate` tells all that are broken at once."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from swiftcp.config.case import Case, Finding, Rule, round_up
from swiftcp.config.concerns import (
    CheckpointConfig,
    Concern,
    FreezeConfig,
    LoggingConfig,
    LogprobsOutputConfig,
    ModelConfig,
    OptimizerConfig,
    RecomputeConfig,
    TrainingConfig,
    ValidationDataConfig,
)
from swiftcp.config.defaults import MISSING_TENSORBOARD, PART_RATES, fill_defaults
from swiftcp.config.facts import Machine, ModelFacts, has_tensorboard, has_transformer_engine, read_model_facts
from swiftcp.config.layout_checks import LAYOUT_RULES, LAYOUT_WARNINGS, describe_layout
from swiftcp.config.paths import (
    CHECKPOINTS_FOLDER,
    INDEX_FILE,
    MARKER_FILE,
    WEIGHTS_FILE,
    is_hub_name,
    may_be_replaced,
    missing,
    split_row_limit,
)
from swiftcp.config.resolved import ResolvedConfig
from swiftcp.config.tuner_checks import TUNER_RULES, TUNER_WARNINGS
from swiftcp.config.wording import counted
from swiftcp.errors import ConfigError, raise_config_errors

_LONG_PACK = 32768
"""Tokens of a pack that nobody asked for by a number, from which on it is told."""


def _weights(case: Case) -> Iterator[Finding]:
    config, folder = case.config, Path(case.config.model)
    if case.facts and not config.init_from_config and not any((folder / name).is_file() for name in (WEIGHTS_FILE, INDEX_FILE)):
        names = f"neither {WEIGHTS_FILE} nor {INDEX_FILE}"
        yield "model", f"model {folder} holds {names}: add the weights, or set init_from_config true for random ones"


def _datasets(case: Case) -> Iterator[Finding]:
    for key in ("dataset", "val_dataset"):
        for dataset in getattr(case.config, key, []):
            path, limit = split_row_limit(dataset)
            if not path.exists() and not is_hub_name(str(path)):
                yield key, missing(key, path)
            if limit == 0:
                yield key, f"{key} {dataset} takes 0 rows: set #N to 1 or more"


def _alignment(case: Case) -> Iterator[Finding]:
    align, two_cp = case.config.pack_align, case.two_cp
    if align % two_cp:
        yield "pack_align", f"pack_align {align} is no multiple of 2*CP = {two_cp}: set {round_up(align, two_cp)}"


def _lengths(case: Case) -> Iterator[Finding]:
    config, align = case.config, round_up(case.config.pack_align, case.two_cp)
    if not config.packing:
        if case.given("max_length") and config.max_length % case.two_cp:
            rounded = round_up(config.max_length, case.two_cp)
            yield "max_length", f"max_length {config.max_length} is no multiple of 2*CP = {case.two_cp}: set {rounded}"
        return
    key = "packing_length" if case.given("packing_length") else "max_length"
    length = getattr(config, key)
    if case.given(key) and length % align:
        yield key, f"{key} {length} is no multiple of pack_align = {align}: set {round_up(length, align)}"
    elif case.given("packing_length") and config.max_length and round_up(config.max_length, align) > length:
        yield (
            "packing_length",
            f"packing_length {config.packing_length} is less than max_length {config.max_length}, padded to a multiple of "
            f"pack_align {align}: set packing_length {round_up(config.max_length, align)} or a smaller max_length",
        )


def _batch(case: Case) -> Iterator[Finding]:
    config = case.config
    if config.packing and config.micro_batch_size > 1:
        yield (
            "micro_batch_size",
            f"micro_batch_size {config.micro_batch_size} with packing: a packed micro-batch is one pack: set micro_batch_size 1 and "
            "a larger packing_length, or packing false",
        )
    if not case.has(TrainingConfig) or case.data_parallel_size is None:
        return
    rows = config.micro_batch_size * case.data_parallel_size
    if config.global_batch_size % rows:
        yield (
            "global_batch_size",
            f"global_batch_size {config.global_batch_size} is no multiple of micro_batch_size {config.micro_batch_size} x "
            f"dp {case.data_parallel_size} = {rows}: set {round_up(config.global_batch_size, rows)}",
        )


def _device(case: Case) -> Iterator[Finding]:
    machine = case.machine
    if case.config.device == "cuda" and machine.num_gpus < machine.local_world_size:
        yield (
            "device",
            f"device cuda with {machine.local_world_size} ranks on this machine, which has {machine.num_gpus} visible GPUs: "
            "set nproc_per_node to at most that, or device cpu",
        )


def _transformer_engine_problem(case: Case) -> str | None:
    if case.config.device == "cpu":
        return "device is cpu"
    return None if has_transformer_engine() else "transformer-engine is not installed (pip install 'swiftcp[te]')"


def _transformer_engine(case: Case) -> Iterator[Finding]:
    problem = _transformer_engine_problem(case)
    if problem and case.has(OptimizerConfig, CheckpointConfig) and case.config.use_distributed_optimizer:
        yield (
            "use_distributed_optimizer",
            f"use_distributed_optimizer true, but {problem}: without Transformer Engine what a checkpoint holds of its state could not be "
            "loaded again: set false",
        )
    if problem and case.config.attention_backend == "te":
        yield "attention_backend", f"attention_backend te, but {problem}: set auto or torch"
    if case.has(RecomputeConfig) and "layernorm" in (case.config.recompute_modules or []):
        if case.config.attention_backend == "torch":
            problem = "attention_backend is torch"
        if problem:
            yield "recompute_modules", f"recompute_modules layernorm needs Transformer Engine, but {problem}: leave layernorm out"


def _optimizer_state(case: Case) -> Iterator[Finding]:
    if not case.has(OptimizerConfig):
        return
    config = case.config
    if config.use_precision_aware_optimizer and not config.use_distributed_optimizer:
        yield (
            "use_precision_aware_optimizer",
            "use_precision_aware_optimizer needs use_distributed_optimizer: set that true (CUDA), or this false",
        )
    for key in ("exp_avg_dtype", "exp_avg_sq_dtype"):
        if (dtype := getattr(config, key)) != "fp32" and not config.use_precision_aware_optimizer:
            yield key, f"{key} {dtype} needs use_precision_aware_optimizer: set that true, or {key} fp32"


def _duration(case: Case) -> Iterator[Finding]:
    if not case.has(TrainingConfig, OptimizerConfig):
        return
    config = case.config
    if config.train_iters and config.num_train_epochs:
        yield (
            "train_iters",
            f"train_iters {config.train_iters} and num_train_epochs {config.num_train_epochs} both say when training ends: keep one",
        )
    if config.lr_warmup_fraction is not None and config.lr_warmup_iters:
        yield (
            "lr_warmup_fraction",
            f"lr_warmup_fraction {config.lr_warmup_fraction} and lr_warmup_iters {config.lr_warmup_iters} both say how long the "
            "warm-up is: keep one",
        )
    if config.train_iters and config.lr_warmup_iters >= config.train_iters:
        yield (
            "lr_warmup_iters",
            f"lr_warmup_iters {config.lr_warmup_iters} is not less than train_iters {config.train_iters}: "
            f"set it to {config.train_iters - 1} or less",
        )
    for key in ("lr", *PART_RATES):
        if config.min_lr > (peak := getattr(config, key)):
            yield "min_lr", f"min_lr {config.min_lr} is above {key} {peak}: set it to at most that"
            return


def _recompute(case: Case) -> Iterator[Finding]:
    if not case.has(RecomputeConfig):
        return
    config = case.config
    if config.recompute_granularity != "full":
        for key in ("recompute_method", "recompute_num_layers"):
            if (value := getattr(config, key)) is not None:
                yield (
                    key,
                    f"{key} {value} belongs to recompute_granularity full, but that is {config.recompute_granularity}: "
                    "set recompute_granularity full, or leave it out",
                )
        return
    if config.recompute_num_layers is None:
        yield "recompute_method", "recompute_method block needs a number of layers: set recompute_num_layers"
    elif case.facts and config.recompute_num_layers > case.facts.num_hidden_layers:
        num_layers = case.facts.num_hidden_layers
        yield (
            "recompute_num_layers",
            f"recompute_num_layers {config.recompute_num_layers} is more than the model's {num_layers} layers: set {num_layers} or less",
        )


def _media(case: Case) -> Iterator[Finding]:
    for low, high in (
        ("image_min_token_num", "image_max_token_num"),
        ("video_min_token_num", "video_max_token_num"),
        ("fps_min_frames", "fps_max_frames"),
    ):
        smallest, largest = getattr(case.config, low), getattr(case.config, high)
        if smallest and largest and smallest > largest:
            yield low, f"{low} {smallest} is above {high} {largest}: set it to {largest} or less"


def _media_root(case: Case) -> Iterator[Finding]:
    root = case.config.media_root
    if root and not Path(root).is_dir():
        yield "media_root", missing("media_root", Path(root)) if not Path(root).exists() else f"media_root {root} is no folder: set one"


def _trained_parts(case: Case) -> Iterator[Finding]:
    if case.has(FreezeConfig) and case.config.freeze_llm and case.config.freeze_vit and case.config.freeze_aligner:
        yield "freeze_llm", "freeze_llm, freeze_vit and freeze_aligner are all true, so nothing would be trained: set one to false"


def _trackers(case: Case) -> Iterator[Finding]:
    if not case.has(LoggingConfig):
        return
    report_to = case.config.report_to
    if "none" in report_to and len(set(report_to)) > 1:
        yield "report_to", f"report_to {' '.join(report_to)}: none stands alone: leave it out"
    if "tensorboard" in report_to and not has_tensorboard():
        yield "report_to", f"report_to tensorboard, but {MISSING_TENSORBOARD}: install it, or set none"


def writable(key: str, path: Path) -> Iterator[Finding]:
    """Writes a file without a name: permissions alone say nothing of read-only file systems, or to root."""
    existing = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), Path("/"))
    if not existing.is_dir():
        yield key, f"{key} {path} cannot be made: {existing} is a file: set another folder"
        return
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError as error:
        reason = f"is no folder that may be written ({error.strerror})"
        yield key, f"{key} {path} cannot be made: {existing} {reason}: set another folder"


def not_replaceable(key: str, what: str, folder: Path, model: Path) -> Iterator[Finding]:
    """What the export would refuse to replace, said before all work rather than behind it."""
    if folder.resolve() == model.resolve():
        yield key, f"{what} is the model itself, which would be replaced: set another folder"
    elif not may_be_replaced(folder):
        yield key, f"{what} holds files that are no model: set another folder, or move them"


def _outputs(case: Case) -> Iterator[Finding]:
    if case.has(CheckpointConfig):
        output_dir = Path(case.config.output_dir)
        yield from writable("output_dir", output_dir)
        if case.config.save_safetensors:
            yield from not_replaceable("output_dir", f"output_dir {output_dir}: its hf folder", output_dir / "hf", Path(case.config.model))
    if case.has(LogprobsOutputConfig):
        output = Path(case.config.output)
        yield from writable("output", output.parent)
        if output.is_dir():
            yield "output", f"output {output} is a folder: name a file in it"


def _resume(case: Case) -> Iterator[Finding]:
    if not case.has(CheckpointConfig) or case.config.resume == "auto":
        return
    checkpoints, resume = Path(case.config.output_dir) / CHECKPOINTS_FOLDER, Path(case.config.resume)
    if case.config.resume == "never":
        if checkpoints.is_dir() and any(checkpoints.iterdir()):
            yield "resume", f"resume never, but {checkpoints} holds checkpoints: set resume auto, or another output_dir"
    elif not resume.exists():
        yield "resume", f"{missing('resume', resume)} (resume is auto, never or a checkpoint folder)"
    elif not (resume / MARKER_FILE).is_file():
        yield (
            "resume",
            f"resume {resume} is no complete checkpoint, for it holds no {MARKER_FILE}: set resume to a folder like "
            f"{checkpoints / 'step-000500'}, or to auto for the newest one in output_dir",
        )


RULES: tuple[Rule, ...] = (
    _weights,
    _datasets,
    *LAYOUT_RULES,
    _alignment,
    _lengths,
    _batch,
    _device,
    _transformer_engine,
    _optimizer_state,
    _duration,
    _recompute,
    _media,
    _media_root,
    _trained_parts,
    *TUNER_RULES,
    _trackers,
    _outputs,
    _resume,
)


BENCH_RULES: tuple[Rule, ...] = (*LAYOUT_RULES, _device, _transformer_engine, _optimizer_state, _recompute, _trained_parts)
"""Those that hold without a model folder and rows."""

EXPORT_RULES: tuple[Rule, ...] = (*LAYOUT_RULES, _device)
"""Those that hold where nothing is trained or read."""


def _warn_lengths(case: Case) -> Iterator[Finding]:
    if case.facts and case.config.max_length and case.config.max_length > case.facts.max_position_embeddings:
        yield "max_length", f"max_length {case.config.max_length} is above the model's {case.facts.max_position_embeddings} positions"


def _warn_long_packs(case: Case) -> Iterator[Finding]:
    """A model is made for lengths that few rows have, and few devices can hold; on a GPU every pack is as long."""
    length = case.config.packing_length
    if case.config.packing and length and length > _LONG_PACK and not case.given("max_length") and not case.given("packing_length"):
        yield (
            "packing_length",
            f"every pack has {length} tokens, the most that the model was made for: set max_length to what the longest row needs, "
            "or packing_length to what fits the device",
        )


def _warn_without_effect(case: Case) -> Iterator[Finding]:
    config = case.config
    if case.given("cp_comm_type") and (config.attention_backend == "torch" or _transformer_engine_problem(case)):
        yield "cp_comm_type", f"cp_comm_type {config.cp_comm_type} has no effect without Transformer Engine's attention"
    if not config.packing and case.given("packing_length"):
        yield "packing_length", f"packing_length {config.packing_length} has no effect with packing false"
    if case.has(RecomputeConfig) and config.recompute_granularity != "selective" and config.recompute_modules:
        granularity = config.recompute_granularity
        yield "recompute_modules", f"recompute_modules has no effect with recompute_granularity {granularity}"
    if case.has(OptimizerConfig) and config.lr_decay_style == "constant" and config.min_lr:
        yield "min_lr", f"min_lr {config.min_lr} has no effect with lr_decay_style constant"
    if case.has(OptimizerConfig, FreezeConfig):
        for key, frozen in PART_RATES.items():
            if case.given(key) and getattr(config, frozen):
                yield key, f"{key} {getattr(config, key)} has no effect with {frozen} true"


def _warn_trackers(case: Case) -> Iterator[Finding]:
    if case.has(LoggingConfig) and not case.given("report_to") and not has_tensorboard():
        yield "report_to", f"no TensorBoard events are written: {MISSING_TENSORBOARD}; report_to none silences this"


def _warn_evaluation(case: Case) -> Iterator[Finding]:
    if not case.has(ValidationDataConfig, LoggingConfig):
        return
    config = case.config
    if config.val_dataset and config.split_dataset_ratio:
        yield "split_dataset_ratio", f"split_dataset_ratio {config.split_dataset_ratio} has no effect beside val_dataset"
    if not config.val_dataset and not config.split_dataset_ratio:
        for key in ("eval_steps", "eval_iters"):
            if case.given(key):
                yield key, f"{key} has no effect without val_dataset or split_dataset_ratio"


WARNINGS: tuple[Rule, ...] = (
    *LAYOUT_WARNINGS,
    *TUNER_WARNINGS,
    _warn_lengths,
    _warn_long_packs,
    _warn_without_effect,
    _warn_trackers,
    _warn_evaluation,
)


def _derived(case: Case) -> Iterator[str]:
    """Lines about what follows from valid values."""
    config, dp = case.config, case.data_parallel_size
    assert dp is not None
    yield describe_layout(case)
    if case.has(TrainingConfig):
        batch = counted(config.global_batch_size, "pack" if config.packing else "row")
        unit = f"{batch} of {counted(config.packing_length, 'token')}" if config.packing else batch
        num_micro_batches = config.global_batch_size // (config.micro_batch_size * dp)
        yield (
            f"step: {unit} = micro_batch_size {config.micro_batch_size} x dp {dp} x "
            f"{counted(num_micro_batches, 'micro-batch')} of each rank"
        )


def _messages(rules: Sequence[Rule], case: Case) -> list[str]:
    return [f"{message} [{case.origins[key]}]" for rule in rules for key, message in rule(case)]


def check(rules: Sequence[Rule], case: Case, problems: Sequence[str] = ()) -> None:
    """Raises: ConfigError: rules are broken, or there were problems before; all of them in one error."""
    raise_config_errors([*problems, *_messages(rules, case)])


def validate[C: Concern](resolved: ResolvedConfig[C], machine: Machine) -> ResolvedConfig[C]:
    """Fill in the defaults that depend on model and machine, and check every rule across keys.

    Raises:
        ConfigError: rules are broken; all of them in one error.
    """
    assert isinstance(resolved.config, ModelConfig)
    facts: ModelFacts | None = None
    problems: list[str] = []
    try:
        facts = read_model_facts(Path(resolved.config.model))
    except ConfigError as error:
        problems.append(f"{error} [{resolved.origins['model']}]")
    full = fill_defaults(resolved, machine, facts)
    case = Case(full.config, dict(full.origins), machine, facts)
    check(RULES, case, problems)
    return replace(full, warnings=(*full.warnings, *_messages(WARNINGS, case)), derived=tuple(_derived(case)))
