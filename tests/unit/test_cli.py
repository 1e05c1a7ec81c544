"""The command line: help without torch, exit codes, dispatch."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

import swiftcp
from swiftcp import run as run_module
from swiftcp.cli import main
from swiftcp.config import LogprobsConfig, ParityConfig, TrainConfig
from swiftcp.config.bench import BenchConfig
from swiftcp.config.keys import keys_of
from swiftcp.errors import ConfigError, PreemptedError, TrainingError
from tests.unit.config_fixtures import arguments

REPOSITORY = Path(__file__).resolve().parents[2]
COMMANDS = ("sft", "pt", "logprobs", "parity", "bench", "tiny", "doctor")


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch):
    """No variables of launchers, and wide help."""
    launchers = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID")
    for name in launchers:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def python(code: str, *more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *more], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)


def test_help_and_version_import_nothing_heavy():
    code = """
import sys
from swiftcp.cli import main
for arguments in (["--version"], ["--help"], *([command, "--help"] for command in sys.argv[1:])):
    assert main(arguments) == 0, arguments
heavy = {"torch", "megatron", "transformers", "numpy", "datasets", "av"} & set(sys.modules)
assert not heavy, heavy
"""
    result = python(code, *COMMANDS)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[0] == swiftcp.__version__


def test_import_changes_nothing_and_is_light():
    code = "import sys; import swiftcp; assert not {'torch', 'pydantic', 'typer'} & set(sys.modules); swiftcp.sft, swiftcp.pt"
    assert python(code).returncode == 0


def test_python_m_swiftcp():
    result = subprocess.run([sys.executable, "-m", "swiftcp", "--version"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.strip()) == (0, swiftcp.__version__)


def test_version_is_that_of_the_package():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["version"] == swiftcp.__version__
    assert (REPOSITORY / "swiftcp" / "py.typed").exists()


@pytest.mark.parametrize(
    ("command", "config_class"), [("sft", TrainConfig), ("logprobs", LogprobsConfig), ("parity", ParityConfig), ("bench", BenchConfig)]
)
def test_help_shows_every_key_by_concern(command, config_class, capsys):
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    for key in keys_of(config_class).values():
        assert f"--{key.name}" in text
        assert f"─ {key.panel} ─" in text
        assert key.help.split(". ")[0][:50] in text


def test_keys_not_built_are_absent_from_help(capsys):
    main(["sft", "--help"])
    assert "fp8_format" not in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["sfft"], ["tiny"], ["tiny", "qwen3_vl", "d", "--seed", "x"], ["--nonsense"], []])
def test_usage_errors_exit_2(arguments, capsys):
    assert main(arguments) == 2


@pytest.mark.parametrize(("typed", "ours"), [("train", "sft"), ("pretrain", "pt"), ("logprob", "logprobs")])
def test_a_command_of_other_tools_is_answered_with_ours(typed, ours, capsys):
    assert main([typed, "x.yaml"]) == 2
    errors = capsys.readouterr().err
    assert f"'{ours}'" in errors and "'tiny'" not in errors


def test_config_errors_exit_2_with_one_message(capsys):
    assert main(["sft", "--learning_rte", "1"]) == 2
    errors = capsys.readouterr().err
    assert errors.count("did you mean 'lr'") == 1 and "Traceback" not in errors and errors.startswith("swiftcp: error:")


class Recorder:
    """Stands in for what commands dispatch to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.result: Any = None
        for name, function in (("sft", "train"), ("logprobs", "run"), ("parity", "run")):
            module = types.ModuleType(f"swiftcp.trainers.{name}")
            setattr(module, function, self.record)
            monkeypatch.setitem(sys.modules, module.__name__, module)
            package = types.ModuleType("swiftcp.trainers") if "swiftcp.trainers" not in sys.modules else sys.modules["swiftcp.trainers"]
            monkeypatch.setitem(sys.modules, "swiftcp.trainers", package)
            monkeypatch.setattr(package, name, module, raising=False)
        monkeypatch.setattr(run_module, "launch_local", self.launch)

    def record(self, *call: Any) -> Any:
        self.calls.append(call)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result

    def launch(self, command: list[str], nproc: int, **_: Any) -> Any:
        return self.record(command, nproc) or 0


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    return Recorder(monkeypatch)


@pytest.mark.parametrize("mode", ["sft", "pt"])
def test_one_rank_runs_in_this_process(recorder, tmp_path, mode, capsys):
    assert main([mode, *arguments(tmp_path, "--lr", "1e-4")]) == 0
    ((resolved, called_mode),) = recorder.calls
    assert (called_mode, resolved.config.lr, resolved.config.max_length) == (mode, 1e-4, 4096)
    shown = capsys.readouterr().out
    assert "world 1 = cp 1 x dp 1" in shown and "[command line: --lr]" in shown


def test_several_ranks_are_launched_with_the_same_command_line(recorder, tmp_path):
    given = arguments(tmp_path, "-cp", "2")
    assert main(["sft", *given]) == 0
    assert recorder.calls == [(["sft", *given], 2)]


def test_the_exit_code_of_ranks_is_passed_on(recorder, tmp_path):
    recorder.result = 75
    assert main(["sft", *arguments(tmp_path, "--nproc_per_node", "2")]) == 75


def test_a_rank_joins_what_it_finds(recorder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    for name in ("GROUP_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with monkeypatch.context() as inner:
        inner.setattr(os, "environ", dict(os.environ))
        assert main(["sft", *arguments(tmp_path, "-cp", "2")]) == 0
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["LOCAL_RANK"]) == ("1", "2", "1")
    assert len(recorder.calls) == 1 and capsys.readouterr().out == ""


def test_all_errors_are_found_before_ranks_start(recorder, tmp_path):
    assert main(["sft", *arguments(tmp_path, "-cp", "2", "--max_length", "1001")]) == 2
    assert recorder.calls == []


@pytest.mark.parametrize(
    "variables",
    [
        dict(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="1"),
        dict(SLURM_PROCID="1", SLURM_NTASKS="2", SLURM_LOCALID="1"),
    ],
)
def test_only_the_first_rank_of_a_node_tells_a_config_error(recorder, monkeypatch, capsys, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["sft", "--lr", "x"]) == 2
    assert capsys.readouterr().err == ""


def test_logprobs_and_parity(recorder, tmp_path, capsys):
    base = [item for item in arguments(tmp_path) if item not in ("--output_dir", str(tmp_path / "out"))]
    assert main(["logprobs", *base, "--output", str(tmp_path / "out.jsonl"), "--mode", "pt"]) == 0
    assert recorder.calls[0][0].config.mode == "pt"
    recorder.result = 1
    assert main(["parity", *base, "-cp", "2"]) == 1
    assert recorder.calls[1][0].derived == ("world 2 = cp 2 x dp 1",)


def test_parity_does_not_join_other_launchers(recorder, tmp_path, monkeypatch, capsys):
    for name, value in dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="1").items():
        monkeypatch.setenv(name, value)
    base = [item for item in arguments(tmp_path) if item not in ("--output_dir", str(tmp_path / "out"))]
    assert main(["parity", *base]) == 2
    assert "run it without a launcher" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"), [(TrainingError("x"), 1), (ConfigError("x"), 2), (PreemptedError("x"), 75), (KeyboardInterrupt(), 130)]
)
def test_exit_codes_of_errors(recorder, tmp_path, error, code, capsys):
    recorder.result = error
    assert main(["sft", *arguments(tmp_path)]) == code


def test_sft_from_python(recorder, tmp_path, capsys):
    given = arguments(tmp_path)
    values = {given[i].removeprefix("--"): given[i + 1] for i in range(0, len(given), 2)} | {"packing": False, "dataset": [given[3]]}
    swiftcp.sft(values)
    ((resolved, mode),) = recorder.calls
    assert (mode, resolved.config.packing, str(resolved.origins["packing"])) == ("sft", False, "python")
    swiftcp.pt(TrainConfig(**values))
    assert recorder.calls[1][0].config == resolved.config and recorder.calls[1][1] == "pt"


def test_python_values_reach_launched_ranks(recorder, tmp_path):
    given = arguments(tmp_path)
    values = {given[i].removeprefix("--"): given[i + 1] for i in range(0, len(given), 2)}
    swiftcp.sft(values | {"context_parallel_size": 2, "model": Path(values["model"]), "dataset": [Path(given[3])], "strict": False})
    ((command, nproc),) = recorder.calls
    assert (command[0], nproc) == ("sft", 2)
    assert {"--context_parallel_size=2", "--strict=false", f"--model={values['model']}", f'--dataset=["{given[3]}"]'} <= set(command)
    recorder.calls.clear()
    assert main([*command, "--nproc_per_node=1", "--cp_comm_type=p2p"]) == 2  # they parse: only the number of ranks is wrong
    recorder.result = 3
    with pytest.raises(TrainingError, match="exit code 3"):
        swiftcp.sft(values | {"context_parallel_size": 2})
    recorder.result = 75
    with pytest.raises(PreemptedError):
        swiftcp.sft(values | {"context_parallel_size": 2})
    with pytest.raises(ConfigError):
        swiftcp.sft({"learning_rte": 1})


def test_tiny_dispatches(monkeypatch, tmp_path, capsys):
    calls = []
    module = types.ModuleType("swiftcp.models.tiny")
    module.write_tiny = lambda *call: calls.append(call)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "swiftcp.models", types.ModuleType("swiftcp.models"))
    monkeypatch.setitem(sys.modules, "swiftcp.models.tiny", module)
    assert main(["tiny", "qwen3_vl", str(tmp_path), "--seed", "3"]) == 0
    assert calls == [("qwen3_vl", tmp_path, 3)]
