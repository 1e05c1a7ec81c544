"""Where values come from: recipes, options, environment, Python; their precedence, origins and coercion."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from swiftcp.config import LogprobsConfig, ParityConfig, TrainConfig, resolve
from swiftcp.config.keys import keys_of
from swiftcp.config.names import ADVICE, ALIASES, NOT_BUILT
from swiftcp.errors import ConfigError
from tests.unit.config_fixtures import arguments, valid, write_model

BASE = ["--model", "m", "--dataset", "d"]


def recipe(folder: Path, text: str) -> str:
    path = folder / "train.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def read(*arguments: str, environment: dict[str, str] | None = None) -> TrainConfig:
    return resolve(TrainConfig, arguments, environment=environment or {}).config


def error_of(*arguments: str, environment: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        read(*arguments, environment=environment)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_defaults_are_those_of_the_interface():
    config = read(*BASE)
    assert (config.lr, config.min_lr, config.lr_decay_style, config.weight_decay) == (1e-5, 0.0, "cosine", 0.1)
    assert (config.adam_beta1, config.adam_beta2, config.adam_eps, config.clip_grad) == (0.9, 0.95, 1e-8, 1.0)
    assert (config.micro_batch_size, config.global_batch_size, config.packing, config.pack_align) == (1, 16, True, 64)
    assert (config.freeze_llm, config.freeze_vit, config.freeze_aligner, config.init_from_config) == (False, False, False, False)
    assert (config.logging_steps, config.save_steps, config.save_safetensors, config.resume) == (1, 500, True, "auto")
    assert (config.seed, config.device, config.strict, config.truncation_strategy) == (42, "auto", True, "raise")


def test_every_key_has_help_and_a_panel():
    for config_class in (TrainConfig, LogprobsConfig, ParityConfig):
        for key in keys_of(config_class).values():
            assert key.help.endswith("."), key.name
            assert key.panel, key.name
            assert key.metavar, key.name
        assert set(keys_of(config_class)) == set(config_class.model_fields)


def test_name_tables_do_not_contradict_each_other():
    keys = set(keys_of(TrainConfig))
    assert not keys & (set(ALIASES) | set(ADVICE) | set(NOT_BUILT))
    assert not set(ALIASES) & (set(ADVICE) | set(NOT_BUILT))
    assert set(ALIASES.values()) <= keys | set(NOT_BUILT)


def test_options_are_written_in_every_way():
    config = read(*BASE, "--max-length=128", "--Packing", "false", "-cp", "2", "--lr", "3e-4", "--eval_iters", "-1", "--save-steps=7")
    assert (config.max_length, config.packing, config.context_parallel_size) == (128, False, 2)
    assert (config.lr, config.eval_iters, config.save_steps) == (3e-4, -1, 7)
    assert read(*BASE, "--packing", "--strict", "false").packing is True


def test_lists_are_repeated_values_or_yaml_text():
    assert read("--dataset", "a", "b#3", "--model", "m").dataset == ["a", "b#3"]
    assert read("--dataset", "[a, 'b c']", "--model", "m").dataset == ["a", "b c"]
    assert read("--dataset=a,b", "--model", "m").dataset == ["a,b"]
    assert read(*BASE, "--recompute_modules", "core_attn", "mlp").recompute_modules == ["core_attn", "mlp"]


def test_recipe_scalars_and_lists(tmp_path):
    text = "model: m\ndataset: a\nval_dataset: [b, c]\nlr: 1e-5\nmax_length:\nresume: 'null'\ntrain_iters: ~\n"
    config = read(recipe(tmp_path, text))
    assert (config.dataset, config.val_dataset, config.lr) == (["a"], ["b", "c"], 1e-5)
    assert (config.max_length, config.train_iters, config.resume) == (None, None, "null")


def test_recipe_may_stand_behind_options(tmp_path):
    assert read("--lr", "2", recipe(tmp_path, "model: m\ndataset: a\n")).lr == 2.0


def test_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/user")
    config = read("--model", "~/m", "--dataset", "~/d.jsonl#2", "--output_dir", "~/out")
    assert (config.model, config.dataset, config.output_dir) == ("/home/user/m", ["/home/user/d.jsonl#2"], "/home/user/out")


def test_case_38_numbers_are_coerced_by_declared_type(tmp_path):
    base = "model: m\ndataset: d\n"
    assert read(recipe(tmp_path, base + "lr: 1e-5\nweight_decay: '0.5'\nsave_steps: 010\n")).lr == 1e-5
    assert read(recipe(tmp_path, base + "save_steps: 010\n")).save_steps == 10
    assert read(recipe(tmp_path, base + "packing: no\n")).packing is False
    assert read(recipe(tmp_path, base + "output_dir: 2024-01-01\n")).output_dir == "2024-01-01"
    assert read(recipe(tmp_path, base + "output_dir: no\n")).output_dir == "no"


@pytest.mark.parametrize("line", ["lr: [1e-5]", "save_steps: 12:30:00", "fps: 12:30:00", "lr: .nan", "lr: inf", "save_steps: 1e3", "lr:"])
def test_case_38_what_does_not_fit_the_type_is_refused(tmp_path, line):
    message = error_of(recipe(tmp_path, f"model: m\ndataset: d\n{line}\n"))
    assert "train.yaml:3" in message and line.split(":")[0] in message


@pytest.mark.parametrize("line", ["learning_rte: 1", "learning-rte: 1", "optimizer:\n  learning_rte: 1", "lrr: 1"])
def test_case_39_a_typo_names_the_line_and_the_nearest_key(tmp_path, line):
    message = error_of(recipe(tmp_path, f"model: m\ndataset: d\n\n{line}\n"))
    assert "train.yaml:4" in message and "'lr'" in message


def test_case_39_a_typo_on_the_command_line():
    message = error_of(*BASE, "--max_lenght", "5")
    assert "command line" in message and "did you mean 'max_length'" in message


@pytest.mark.parametrize("lines", ["lr: 1\nlr: 2", "lr: 1\nlearning_rate: 1", "save-steps: 1\nsave_steps: 2"])
def test_case_39_a_key_given_twice_is_refused(tmp_path, lines):
    message = error_of(recipe(tmp_path, f"model: m\ndataset: d\n{lines}\n"))
    assert "given twice" in message and "train.yaml:3" in message and "train.yaml:4" in message


def test_case_39_an_option_given_twice_is_refused():
    assert "given twice" in error_of(*BASE, "--lr", "1", "--learning_rate=2")
    assert "given twice" in error_of(*BASE, "--dataset", "e")


@pytest.mark.parametrize(
    ("lower", "upper", "expected"),
    [
        ("num_train_epochs: 2", "--train_iters=5", (5, None)),
        ("train_iters: 5", "--epochs=2", (None, 2)),
        ("num_train_epochs: 2", "--train_iters=null", (None, 2)),
        ("train_iters: 5\nnum_train_epochs: 2", "--train_iters=6", (6, None)),
    ],
)
def test_the_higher_of_two_keys_for_one_thing_wins(tmp_path, lower, upper, expected):
    path = recipe(tmp_path, f"model: m\ndataset: d\n{lower}\n")
    resolved = resolve(TrainConfig, [path, *upper.replace("=", " ").split()], environment={})
    assert (resolved.config.train_iters, resolved.config.num_train_epochs) == expected
    overruled = "num_train_epochs" if expected[1] is None else "train_iters"
    if upper != "--train_iters=null":
        assert "of the command line wins over" in str(resolved.origins[overruled])


def test_warm_up_in_steps_wins_over_a_fraction_of_the_recipe(tmp_path):
    config = read(recipe(tmp_path, "model: m\ndataset: d\nlr_warmup_fraction: 0.1\n"), "--lr_warmup_iters", "0")
    assert (config.lr_warmup_iters, config.lr_warmup_fraction) == (0, None)


def test_case_40_precedence_of_four_sources(tmp_path):
    path = recipe(tmp_path, "model: m\ndataset: d\nfps: 3\nfps_min_frames: 5\nfps_max_frames: 7\n")
    environment = {"FPS": "4", "FPS_MIN_FRAMES": "6"}
    resolved = resolve(TrainConfig, [path, "--fps", "9"], environment=environment)
    config = resolved.config
    assert (config.fps, config.fps_min_frames, config.fps_max_frames, config.video_max_token_num) == (9.0, 6, 7, None)
    assert [str(resolved.origins[key]) for key in ("fps", "fps_min_frames", "fps_max_frames", "video_max_token_num")] == [
        "command line: --fps",
        "environment: FPS_MIN_FRAMES=6",
        f"{path}:5",
        "default",
    ]


def test_case_40_pixels_become_tokens_of_the_model(tmp_path):
    model = str(write_model(tmp_path / "m"))
    config = read(
        "--model", model, "--dataset", "d", environment={"MAX_PIXELS": "1003520", "MIN_PIXELS": "3136", "VIDEO_MAX_PIXELS": "2e5"}
    )
    assert (config.image_max_token_num, config.image_min_token_num, config.video_max_token_num) == (980, 4, 195)
    (tmp_path / "m" / "config.json").write_text((tmp_path / "m" / "config.json").read_text().replace("16", "8"))
    assert read("--model", model, "--dataset", "d", environment={"MAX_PIXELS": "2560"}).image_max_token_num == 10


def test_case_40_variables_that_disagree_are_refused():
    message = error_of(*BASE, environment={"IMAGE_MAX_TOKEN_NUM": "100", "MAX_PIXELS": "1024"})
    assert "IMAGE_MAX_TOKEN_NUM" in message and "MAX_PIXELS" in message
    assert read(*BASE, environment={"IMAGE_MAX_TOKEN_NUM": "1", "MAX_PIXELS": "1024"}).image_max_token_num == 1


def test_environment_values_are_checked_and_named():
    assert "FPS=fast" in error_of(*BASE, environment={"FPS": "fast"})
    assert "MAX_PIXELS" in error_of(*BASE, environment={"MAX_PIXELS": "many"})
    assert read(*BASE, environment={"FPS": ""}).fps is None


def test_variables_without_effect_are_warned_about():
    assert resolve(TrainConfig, BASE, environment={"NFRAMES": "8"}).warnings == ("environment variable NFRAMES has no effect here",)


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ("--learning_rate=2e-5", "lr", 2e-5),
        ("--per_device_train_batch_size=2", "micro_batch_size", 2),
        ("--sequence_len=64", "max_length", 64),
        ("--cutoff_len=64", "max_length", 64),
        ("--max_steps=3", "train_iters", 3),
        ("-cp=4", "context_parallel_size", 4),
    ],
)
def test_names_of_other_tools(option, key, value):
    assert getattr(read(*BASE, option), key) == value


@pytest.mark.parametrize("option", ["-tp=1", "--tuner_type=full", "--sequence_parallel=False", "--train_type=full"])
def test_keys_not_built_are_accepted_where_they_change_nothing(option):
    assert read(*BASE, option) == read(*BASE)


@pytest.mark.parametrize("option", ["--mtp_num_layers=1", "--lora_bias=all", "--fp8_format=e4m3"])
def test_keys_not_built_are_refused_clearly(option):
    assert "not supported yet" in error_of(*BASE, option)


@pytest.mark.parametrize(
    ("option", "right"),
    [
        ("--gradient_accumulation_steps=4", "global_batch_size"),
        ("--bf16=true", "torch_dtype bfloat16"),
        ("--gradient_checkpointing=true", "recompute_granularity"),
        ("--max_pixels=100", "image_max_token_num"),
        ("--attention_backend=flash", "set te"),
        ("--truncation_strategy=split", "set delete"),
    ],
)
def test_another_meaning_is_refused_with_the_right_name(option, right):
    assert right in error_of(*BASE, option)


def test_keys_of_another_command_are_refused():
    with pytest.raises(ConfigError, match="another command"):
        resolve(LogprobsConfig, [*BASE, "--output", "o", "--lr", "1"], environment={})


def test_all_errors_come_at_once(tmp_path):
    message = error_of(recipe(tmp_path, "lr: x\nlearning_rte: 1\nsave_steps: 0\n"), "--mode", "sft")
    assert message.startswith("6 errors:")
    for part in ("train.yaml:1", "train.yaml:2", "train.yaml:3", "another command", "'model' is required", "'dataset' is required"):
        assert part in message


def test_options_need_values():
    assert "--lr has no value" in error_of(*BASE, "--lr")
    assert "belongs to no option" in error_of("r.yaml", *BASE, "--lr", "1", "2")
    assert "no valid YAML" in error_of("--model", "m", "--dataset", "[a")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("lr: !!python/object/apply:os.system [echo]\n", "python/object/apply:os.system"),
        ("lr: !!python/name:os.system x\n", "not allowed"),
        ("? !!python/name:os.system x\n: 1\n", "not allowed"),
        ("a: &a [x]\nb: &b [*a, *a]\nmodel: [*b, *b]\n", "a list or mapping stands inside"),
        ("- lr: 1\n", "train.yaml:1: a recipe is a mapping"),
        ("lr: 1\n lr: 2\n", "train.yaml:2: no valid YAML"),
        ("lr: 1\n---\nlr: 2\n", "train.yaml:2"),
        ("lr: 'x\n", "no valid YAML"),
        ("lr: \x00\n", "no valid YAML"),
    ],
)
def test_recipes_that_are_no_recipes(tmp_path, text, part):
    assert part in error_of(recipe(tmp_path, text))


def test_recipe_paths(tmp_path):
    recipe(tmp_path, "lr: 1")
    assert "did you mean" in error_of(str(tmp_path / "trian.yaml"))
    assert "there is no folder" in error_of(str(tmp_path / "no" / "train.yaml"))
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff\n")
    assert "UTF-8" in error_of(str(tmp_path / "latin.yaml"))
    (tmp_path / "large.yaml").write_bytes(b"#" * (1 << 21))
    assert "bytes" in error_of(str(tmp_path / "large.yaml"))


def test_an_empty_recipe_gives_nothing(tmp_path):
    assert read(recipe(tmp_path, "# nothing\n"), *BASE) == read(*BASE)


def test_values_from_python():
    resolved = resolve(TrainConfig, values={"model": "m", "dataset": ["a"], "learning_rate": 1e-4, "packing": False}, environment={})
    assert (resolved.config.lr, resolved.config.packing, str(resolved.origins["lr"])) == (1e-4, False, "python")
    paths = resolve(TrainConfig, values={"model": Path("m"), "dataset": [Path("a"), "b"]}, environment={}).config
    assert (paths.model, paths.dataset) == ("m", ["a", "b"])


def test_resolved_configuration_is_a_recipe_again(tmp_path):
    resolved = valid(tmp_path, "--lr", "3e-4", "--val_dataset", str(tmp_path / "rows.jsonl"))
    path = recipe(tmp_path, resolved.to_yaml())
    assert read(path) == resolved.config
    assert "lr: 0.0003 # command line: --lr" in resolved.to_yaml()


def test_description_shows_layout_values_and_origins(tmp_path):
    text = valid(tmp_path, "--global_batch_size", "8").describe()
    assert "world 1 = cp 1 x dp 1" in text and "8 packs of 4096 tokens" in text
    row = next(line for line in text.splitlines() if "global_batch_size " in line)
    assert row.split() == ["global_batch_size", "=", "8", "[command", "line:", "--global_batch_size]"]


def test_secrets_are_masked(tmp_path):
    path = recipe(tmp_path, "model: m\ndataset: ['https://user:hunter2@host/rows.jsonl?token=abc123', plain.jsonl]\n")
    resolved = resolve(TrainConfig, [path], environment={})
    for text in (resolved.to_yaml(), resolved.describe()):
        assert "hunter2" not in text and "abc123" not in text and "plain.jsonl" in text and "***" in text


def test_resolved_configuration_can_be_pickled(tmp_path):
    resolved = valid(tmp_path)
    assert pickle.loads(pickle.dumps(resolved)) == resolved


def test_arguments_helper_is_complete(tmp_path):
    assert read(*arguments(tmp_path)).device == "cpu"
