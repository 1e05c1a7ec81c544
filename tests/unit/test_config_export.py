"""`swiftcp export`: what it finds out from the checkpoint, and what it refuses before any model is built."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftcp.config import ResolvedConfig, resolve
from swiftcp.config.export import ExportConfig, validate_export
from swiftcp.errors import ConfigError
from tests.unit.config_fixtures import ONE_CPU_RANK, write_model


def write_checkpoint(folder: Path, model: Path | None) -> Path:
    """A checkpoint as far as configuration looks at it."""
    checkpoint = folder / "run" / "checkpoints" / "step-000004"
    checkpoint.mkdir(parents=True)
    (checkpoint / "complete.json").touch()
    fingerprint = {"model": str(model)} if model else {}
    (checkpoint / "state.json").write_text(json.dumps({"fingerprint": fingerprint}))
    return checkpoint


def valid(checkpoint: Path, output: Path, **more: Any) -> ResolvedConfig[ExportConfig]:
    values = {"checkpoint": checkpoint, "output": output, "device": "cpu", **more}
    return validate_export(resolve(ExportConfig, values=values, environment={}), ONE_CPU_RANK)


def test_the_checkpoint_says_which_model_it_began_from(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    resolved = valid(write_checkpoint(tmp_path, model), tmp_path / "out")
    assert resolved.config.model == str(model)
    moved = write_model(tmp_path / "moved")
    assert valid(tmp_path / "run" / "checkpoints" / "step-000004", tmp_path / "out", model=moved).config.model == str(moved)


def test_a_model_that_moved_is_named_with_the_remedy(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"gone(.|\n)*: set model to where the folder is now") as error:
        valid(checkpoint, tmp_path / "out")
    assert error.value.exit_code == 2
    (checkpoint / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="does not say which model it began from: set model"):
        valid(checkpoint, tmp_path / "out")


def test_what_is_no_complete_checkpoint_is_refused_and_a_complete_one_is_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, write_model(tmp_path / "model"))
    with pytest.raises(ConfigError, match=rf"holds no complete.json: set checkpoint to a folder like {checkpoint}"):
        valid(tmp_path / "run", tmp_path / "out", model=tmp_path / "model")
    with pytest.raises(ConfigError, match=r"step-000005 does not exist: did you mean .*step-000004"):
        valid(checkpoint.with_name("step-000005"), tmp_path / "out", model=tmp_path / "model")


def test_an_output_that_is_no_model_or_the_model_itself_is_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    checkpoint = write_checkpoint(tmp_path, model)
    with pytest.raises(ConfigError, match=r"output .* is the model itself"):
        valid(checkpoint, model)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match=r"output .* holds files that are no model"):
        valid(checkpoint, tmp_path / "home")
    valid(checkpoint, write_model(tmp_path / "earlier"))
