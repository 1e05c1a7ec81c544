"""Rules across keys, and defaults that depend on model and machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swiftcp.config import LogprobsConfig, Machine, ParityConfig, TrainConfig, resolve, validate
from swiftcp.config.paths import split_row_limit
from swiftcp.errors import ConfigError
from tests.unit.config_fixtures import ONE_CPU_RANK, arguments, valid, write_model, write_rows


def without(given: list[str], option: str) -> list[str]:
    at = given.index(option)
    return given[:at] + given[at + 2 :]


def cpu(world_size: int) -> Machine:
    return Machine(world_size, world_size, 0)


def error_of(folder: Path, *more: str, machine: Machine = ONE_CPU_RANK) -> str:
    with pytest.raises(ConfigError) as caught:
        valid(folder, *more, machine=machine)
    return str(caught.value)


def test_defaults_that_depend_on_model_and_machine(tmp_path):
    resolved = valid(tmp_path, machine=cpu(2))
    config = resolved.config
    assert (config.max_length, config.packing_length, config.num_train_epochs, config.eval_steps) == (4096, 4096, 1, 500)
    assert (config.torch_dtype, config.device, config.use_distributed_optimizer, config.nproc_per_node) == ("float32", "cpu", False, 2)
    assert (config.recompute_granularity, config.recompute_modules) == ("none", None)
    assert valid(tmp_path, "--recompute_granularity", "selective").config.recompute_modules == ["core_attn"]
    assert str(resolved.origins["max_length"]) == "default: max_position_embeddings of the model"


@pytest.mark.parametrize("with_te", [True, False])
def test_defaults_on_gpus(tmp_path, monkeypatch, with_te):
    for module in ("checks", "defaults"):
        monkeypatch.setattr(f"swiftcp.config.{module}.has_transformer_engine", lambda: with_te)
    given = without(arguments(tmp_path, "-cp", "2"), "--device")
    resolved = validate(resolve(TrainConfig, given, environment={}), Machine(8, 8, 8))
    config = resolved.config
    assert (config.device, config.torch_dtype, config.use_distributed_optimizer) == ("cuda", "bfloat16", with_te)
    assert resolved.derived[0] == "world 8 = cp 2 x dp 4"


def test_default_length_is_a_multiple_of_the_alignment(tmp_path):
    write_model(tmp_path / "model", max_position_embeddings=1000)
    write_rows(tmp_path / "rows.jsonl")
    assert valid(tmp_path).config.packing_length == 960


def test_default_length_fits_a_pack(tmp_path):
    assert valid(tmp_path, "--packing_length", "128").config.max_length == 128
    assert valid(tmp_path, "--packing_length", "128", "--packing", "false").config.max_length == 4096


def test_output_dir_is_named_after_the_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = without(arguments(tmp_path), "--output_dir")
    assert validate(resolve(TrainConfig, given, environment={}), ONE_CPU_RANK).config.output_dir == "swiftcp_output/model"


def test_derived_lines(tmp_path):
    resolved = valid(tmp_path, "-cp", "2", "--global_batch_size", "12", "--max_length", "128", machine=cpu(4))
    assert resolved.derived == (
        "world 4 = cp 2 x dp 2",
        "step: 12 packs of 128 tokens = micro_batch_size 1 x dp 2 x 6 micro-batches of each rank",
    )


@pytest.mark.parametrize(
    ("more", "world_size", "message"),
    [
        ("--packing false --max_length 1001 -cp 4", 4, "max_length 1001 is no multiple of 2*CP = 8: set 1008"),
        ("--max_length 1001", 1, "max_length 1001 is no multiple of pack_align = 64: set 1024"),
        ("--packing_length 1001 --max_length 640", 1, "packing_length 1001 is no multiple of pack_align = 64: set 1024"),
        ("--max_length 128 --packing_length 64", 1, "packing_length 64 is less than max_length 128"),
        ("--pack_align 60 -cp 4", 4, "pack_align 60 is no multiple of 2*CP = 8: set 64"),
        ("-cp 3", 3, "pack_align 64 is no multiple of 2*CP = 6: set 66"),
        ("--global_batch_size 10 --packing false --micro_batch_size 3", 2, "no multiple of micro_batch_size 3 x dp 2 = 6: set 12"),
        ("--micro_batch_size 2", 1, "set micro_batch_size 1"),
        ("-cp 2", 3, "world 3 is no multiple of context_parallel_size 2: start 4 ranks"),
        ("-cp 4 --cp_comm_type a2a", 4, "num_key_value_heads 2 of the model is no multiple of context_parallel_size 4"),
        ("--train_iters 5 --num_train_epochs 2", 1, "both say when training ends: keep one"),
        ("--lr_warmup_iters 5 --lr_warmup_fraction 0.1", 1, "both say how long the warm-up is"),
        ("--lr_warmup_iters 5 --train_iters 5", 1, "lr_warmup_iters 5 is not less than train_iters 5: set it to 4 or less"),
        ("--min_lr 1e-3", 1, "min_lr 0.001 is above lr 1e-05"),
        ("--min_lr 1e-6 --vit_lr 1e-7", 1, "min_lr 1e-06 is above vit_lr 1e-07"),
        ("--report_to tensorboard none", 1, "none stands alone"),
        ("--recompute_method block", 1, "recompute_method block belongs to recompute_granularity full"),
        ("--recompute_granularity none --recompute_num_layers 2", 1, "recompute_num_layers 2 belongs to"),
        ("--recompute_granularity full --recompute_method block", 1, "set recompute_num_layers"),
        ("--recompute_granularity full --recompute_num_layers 5", 1, "more than the model's 4 layers: set 4 or less"),
        ("--recompute_modules layernorm", 1, "needs Transformer Engine"),
        ("--attention_backend te", 1, "attention_backend te, but device is cpu"),
        ("--image_min_token_num 9 --image_max_token_num 8", 1, "image_min_token_num 9 is above image_max_token_num 8"),
        ("--fps_min_frames 9 --fps_max_frames 8", 1, "fps_min_frames 9 is above"),
        ("--freeze_llm true --freeze_vit true --freeze_aligner true", 1, "nothing would be trained"),
        ("--use_distributed_optimizer true", 1, "use_distributed_optimizer true, but device is cpu"),
        ("--resume missing", 1, "resume missing does not exist"),
    ],
)
def test_broken_rules(tmp_path, more, world_size, message):
    text = error_of(tmp_path, *more.split(), machine=cpu(world_size))
    assert message in text
    assert ("[command line: -" in text) or more == "-cp 3"
    assert "errors:" not in text


def test_all_broken_rules_come_at_once(tmp_path):
    more = "-cp 4 --cp_comm_type a2a --pack_align 60 --max_length 1001 --min_lr 1 --val_dataset none.jsonl"
    text = error_of(tmp_path, *more.split(), machine=cpu(6))
    assert text.startswith("6 errors:")
    for key in ("val_dataset none.jsonl", "world 6", "pack_align 60", "max_length 1001", "num_key_value_heads 2", "min_lr 1.0"):
        assert key in text


@pytest.mark.parametrize(
    "more",
    [
        "--recompute_granularity full",
        "--recompute_granularity full --recompute_method block --recompute_num_layers 2",
        "--recompute_granularity selective --recompute_modules core_attn mlp",
        "--recompute_granularity none",
        "--packing false --micro_batch_size 2 --max_length 1000",
        "--train_iters 3 --lr_warmup_fraction 0.1",
        "-cp 2 --cp_comm_type a2a",
        "--max_length 100 --packing_length 128",
    ],
)
def test_rules_that_hold(tmp_path, more):
    assert valid(tmp_path, *more.split(), machine=cpu(2)).derived[0].startswith("world 2 = cp ")


def test_full_recompute_defaults_to_every_layer(tmp_path):
    config = valid(tmp_path, "--recompute_granularity", "full").config
    assert (config.recompute_method, config.recompute_num_layers, config.recompute_modules) == ("uniform", 1, None)


def test_cuda_needs_as_many_gpus_as_ranks(tmp_path):
    given = without(arguments(tmp_path), "--device")
    with pytest.raises(ConfigError, match="2 ranks on this machine, which has 1 visible GPUs"):
        validate(resolve(TrainConfig, [*given, "--device", "cuda"], environment={}), Machine(2, 2, 1))


def test_model_folder_errors(tmp_path):
    given = without(arguments(tmp_path), "--model")
    model = tmp_path / "model"

    def error(name: str | Path = model) -> str:
        with pytest.raises(ConfigError) as caught:
            validate(resolve(TrainConfig, [*given, "--model", str(name)], environment={}), ONE_CPU_RANK)
        return str(caught.value)

    assert f"did you mean '{model}'?" in error(tmp_path / "modell")
    assert "hf download Qwen/Qwen3-VL-2B" in error("Qwen/Qwen3-VL-2B")
    good = (model / "config.json").read_text()
    for text, part in (
        (json.dumps({"model_type": "llama"}), "model_type 'llama'"),
        (json.dumps({"model_type": "qwen3_vl"}), "lacks a size"),
        ("{", "no valid JSON"),
        ("[]", "no JSON object"),
    ):
        (model / "config.json").write_text(text)
        assert part in error()
    (model / "config.json").unlink()
    assert "holds no config.json" in error()
    (model / "config.json").write_text(good)
    (model / "model.safetensors").unlink()
    (model / "adapter_model.safetensors").touch()
    assert "holds neither model.safetensors nor model.safetensors.index.json" in error()


def test_random_weights_need_no_weights_file(tmp_path):
    given = arguments(tmp_path, "--init_from_config", "true")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert validate(resolve(TrainConfig, given, environment={}), ONE_CPU_RANK).config.init_from_config is True


def test_dataset_errors(tmp_path):
    given = without(arguments(tmp_path), "--dataset")
    for dataset, part in (
        ("row.jsonl", f"did you mean '{tmp_path / 'rows.jsonl'}'?"),
        ("row.jsonl#3", "did you mean"),
        ("rows.jsonl#0", "takes 0 rows"),
        ("rows.jsonl#many", "does not exist"),
        ("no/rows.jsonl", "there is no folder"),
    ):
        with pytest.raises(ConfigError) as caught:
            validate(resolve(TrainConfig, [*given, "--dataset", f"{tmp_path}/{dataset}"], environment={}), ONE_CPU_RANK)
        assert part in str(caught.value)


def test_row_limits(tmp_path):
    assert split_row_limit("a.jsonl#12") == (Path("a.jsonl"), 12)
    assert split_row_limit("a#b.jsonl") == (Path("a#b.jsonl"), None)
    (tmp_path / "a#1").mkdir()
    assert split_row_limit(f"{tmp_path}/a#1") == (tmp_path / "a#1", None)


def test_resume_never_refuses_a_folder_with_checkpoints(tmp_path):
    assert valid(tmp_path, "--resume", "never").config.resume == "never"
    (tmp_path / "out" / "checkpoints" / "step-000001").mkdir(parents=True)
    assert "holds checkpoints" in error_of(tmp_path, "--resume", "never")


def test_resume_names_a_complete_checkpoint(tmp_path):
    checkpoints = tmp_path / "out" / "checkpoints"
    checkpoint = checkpoints / "step-000001"
    checkpoint.mkdir(parents=True)
    (checkpoints / "latest").write_text("step-000001\n")
    for name in ("out", "out/checkpoints", "out/checkpoints/latest", "out/checkpoints/step-000001"):
        assert f"{name} is no complete checkpoint, for it holds no complete.json" in error_of(tmp_path, "--resume", f"{tmp_path}/{name}")
    assert f"did you mean '{checkpoint}'?" in error_of(tmp_path, "--resume", f"{checkpoints}/step-00001")
    (checkpoint / "complete.json").touch()
    assert valid(tmp_path, "--resume", str(checkpoint)).config.resume == str(checkpoint)


def test_outputs_must_be_writable_places(tmp_path):
    given = without(arguments(tmp_path), "--output_dir")
    with pytest.raises(ConfigError, match=r"output_dir .* cannot be made: .* is a file"):
        validate(resolve(TrainConfig, [*given, "--output_dir", f"{tmp_path}/rows.jsonl/out"], environment={}), ONE_CPU_RANK)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "hf").symlink_to(tmp_path / "model")
    assert "its hf folder is the model itself" in error_of(tmp_path)
    assert valid(tmp_path, "--save_safetensors", "false")
    (tmp_path / "out" / "hf").unlink()
    (tmp_path / "out" / "hf").mkdir()
    assert valid(tmp_path)
    (tmp_path / "out" / "hf" / "thesis.tex").touch()
    assert "its hf folder holds files that are no model" in error_of(tmp_path)
    with pytest.raises(ConfigError, match="is a folder: name a file in it"):
        validate(resolve(LogprobsConfig, [*given, "--output", str(tmp_path)], environment={}), ONE_CPU_RANK)


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ("--max_length 8192", "above the model's 4096 positions"),
        ("--packing false --packing_length 64", "packing_length 64 has no effect"),
        ("--cp_comm_type a2a", "cp_comm_type a2a has no effect"),
        ("--cp_partition_mode whole", "cp_partition_mode whole has no effect with context_parallel_size 1"),
        ("--recompute_granularity none --recompute_modules mlp", "recompute_modules has no effect"),
        ("--lr_decay_style constant --min_lr 1e-6", "min_lr 1e-06 has no effect"),
        ("--freeze_vit true --vit_lr 1e-6", "vit_lr 1e-06 has no effect with freeze_vit true"),
        ("--eval_steps 5", "eval_steps has no effect"),
    ],
)
def test_options_without_effect_warn(tmp_path, more, part):
    resolved = valid(tmp_path, *more.split())
    assert [part in warning for warning in resolved.warnings] == [True]
    assert f"warning: {resolved.warnings[0]}" in resolved.describe()


def test_packs_as_long_as_the_model_allows_are_told_unless_a_length_is_given(tmp_path):
    write_model(tmp_path / "model", max_position_embeddings=262144)
    write_rows(tmp_path / "rows.jsonl")
    assert "every pack has 262144 tokens" in valid(tmp_path).warnings[0]
    for given in (("--max_length", "262144"), ("--packing_length", "65536"), ("--packing", "false")):
        assert not valid(tmp_path, *given).warnings


def test_a_split_beside_validation_data_warns(tmp_path):
    resolved = valid(tmp_path, "--split_dataset_ratio", "0.1", "--val_dataset", str(tmp_path / "rows.jsonl"))
    assert "split_dataset_ratio 0.1 has no effect beside val_dataset" in resolved.warnings[0]


def test_other_commands_share_the_rules(tmp_path):
    base = without(arguments(tmp_path), "--output_dir")
    logprobs = validate(resolve(LogprobsConfig, [*base, "--output", f"{tmp_path}/out.jsonl", "-cp", "2"], environment={}), cpu(2))
    assert (logprobs.config.mode, logprobs.config.packing_length, logprobs.derived) == ("sft", 4096, ("world 2 = cp 2 x dp 1",))
    parity = validate(resolve(ParityConfig, [*base, "--mode", "pt"], environment={}), ONE_CPU_RANK)
    assert (parity.config.mode, parity.config.torch_dtype) == ("pt", "float32")
    with pytest.raises(ConfigError, match=r"2\*CP = 6"):
        validate(resolve(ParityConfig, [*base, "-cp", "3"], environment={}), cpu(3))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that takes no files")
def test_an_output_dir_where_nothing_can_be_written_is_refused_also_to_root(tmp_path):
    given = without(arguments(tmp_path), "--output_dir")
    with pytest.raises(ConfigError, match="output_dir /proc/swiftcp cannot be made: /proc is no folder that may be written"):
        validate(resolve(TrainConfig, [*given, "--output_dir", "/proc/swiftcp"], environment={}), ONE_CPU_RANK)


def test_small_moments_need_the_optimizer_that_has_them(tmp_path):
    assert "use_precision_aware_optimizer needs use_distributed_optimizer" in error_of(tmp_path, "--use_precision_aware_optimizer", "true")
    assert "exp_avg_dtype bf16 needs use_precision_aware_optimizer" in error_of(tmp_path, "--exp_avg_dtype", "bf16")


def test_parts_learn_as_the_model_does_by_default(tmp_path):
    config = valid(tmp_path, "--lr", "2e-4", "--aligner_lr", "1e-4").config
    assert (config.vit_lr, config.aligner_lr) == (2e-4, 1e-4)


def test_tensorboard_that_is_missing_is_an_error_only_where_it_is_asked_for(tmp_path, monkeypatch):
    for module in ("checks", "defaults"):
        monkeypatch.setattr(f"swiftcp.config.{module}.has_tensorboard", lambda: False)
    assert "report_to tensorboard, but tensorboard is not installed" in error_of(tmp_path, "--report_to", "tensorboard")
    resolved = valid(tmp_path)
    assert resolved.config.report_to == ["none"]
    assert len([warning for warning in resolved.warnings if "no TensorBoard events" in warning]) == 1
    assert not valid(tmp_path, "--report_to", "none").warnings


def test_counts_of_one_are_singular(tmp_path):
    derived = valid(tmp_path, "--global_batch_size", "1", "--max_length", "128").derived
    assert derived[1] == "step: 1 pack of 128 tokens = micro_batch_size 1 x dp 1 x 1 micro-batch of each rank"
