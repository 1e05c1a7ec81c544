"""Run state and recipe fingerprint, files that survive crashes, failpoints, and pickles that are not opened."""

import os
import pickle
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from swiftcp.checkpoint import durable
from swiftcp.checkpoint.run_state import RunState, check_fingerprint
from swiftcp.checkpoint.together import together
from swiftcp.errors import CheckpointError, ConfigError

STATE = RunState(
    step=7,
    epoch=1,
    global_batches=2,
    samples=90,
    tokens=12345,
    labelled_tokens=678,
    plan_hash="abc",
    fingerprint={"lr": 0.1 + 0.2, "dataset": ["a", "b"]},
    elapsed_seconds=1.5,
)


def test_state_survives_its_file(tmp_path):
    (tmp_path / "state.json").write_text(STATE.to_json())
    assert RunState.read(tmp_path) == STATE
    assert RunState.read(tmp_path).elapsed_seconds == 1.5
    assert replace(STATE, elapsed_seconds=9.0) == STATE
    assert replace(STATE, step=8) != STATE


@pytest.mark.parametrize("text", ["", "{}", '{"step": 1}', "[]"])
def test_a_state_that_cannot_be_read_is_named(tmp_path, text):
    (tmp_path / "state.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"state\.json cannot be read"):
        RunState.read(tmp_path)


def test_a_recipe_that_changes_the_result_is_refused_by_key(tmp_path):
    saved = {"lr": 1e-5, "seed": 1, "dataset": ["a"]}
    check_fingerprint(saved, {"lr": 1e-5, "seed": 1, "dataset": ("a",)}, tmp_path)
    with pytest.raises(ConfigError) as error:
        check_fingerprint(saved, {"lr": 2e-5, "dataset": ["a"], "packing": True}, tmp_path)
    text = str(error.value)
    assert "lr: 1e-05 there, 2e-05 now" in text
    assert "seed: 1 there, '(not set)' now" in text
    assert "packing: '(not set)' there, True now" in text
    assert "dataset" not in text


def test_a_folder_is_published_whole_and_replaces_what_was_there(tmp_path):
    final = tmp_path / "final"
    for content in ("old", "new"):
        with durable.new_folder(final) as aside:
            (aside / "file").write_text(content)
            assert not final.exists() or (final / "file").read_text() == "old"
        assert (final / "file").read_text() == content
    assert list(tmp_path.iterdir()) == [final]


def test_a_folder_that_fails_leaves_the_old_one_and_no_rest(tmp_path):
    final = tmp_path / "final"
    with durable.new_folder(final) as aside:
        (aside / "file").write_text("old")
    with pytest.raises(OSError, match="disk full"), durable.new_folder(final) as aside:
        (aside / "file").write_text("half")
        raise OSError("disk full")
    assert list(tmp_path.iterdir()) == [final]
    assert (final / "file").read_text() == "old"


def test_failpoint_kills_at_the_nth_pass_and_only_when_set():
    code = "from swiftcp.failpoints import failpoint\nfor i in range(3): print(i, flush=True); failpoint('a.b'); failpoint('a.c')"

    def run(value: str | None) -> subprocess.CompletedProcess[str]:
        env = {**os.environ} if value is None else {**os.environ, "SWIFTCP_FAILPOINT": value}
        return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)

    unset, second, other = run(None), run("a.b:2"), run("a.b.c")
    assert (unset.returncode, unset.stdout) == (0, "0\n1\n2\n")
    assert (second.returncode, second.stdout) == (-signal.SIGKILL, "0\n1\n")
    assert other.returncode == 0
    assert run("a.c").stdout == "0\n"


def test_an_error_alone_stays_what_it_was():
    with pytest.raises(KeyError), together("a step"):
        raise KeyError("x")


class _Sentinel:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_case_45_a_crafted_table_of_contents_is_not_run(tmp_path):
    from swiftcp.checkpoint.safe_pickle import check_pickles

    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Sentinel(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match=r"asks for pathlib\.Path\.touch"):
        check_pickles(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_case_45_a_crafted_object_inside_a_shard_is_not_run(tmp_path):
    import torch
    import torch.distributed.checkpoint as torch_checkpoint

    from swiftcp.checkpoint.safe_pickle import check_pickles

    torch_checkpoint.save({"tensor": torch.ones(2), "plain": {"a": [1, 2.0, "b"]}}, checkpoint_id=str(tmp_path / "good"), no_dist=True)
    check_pickles(tmp_path / "good")
    torch_checkpoint.save({"object": _Sentinel(tmp_path / "ran")}, checkpoint_id=str(tmp_path / "bad"), no_dist=True)
    with pytest.raises(CheckpointError, match="Weights only load failed"):
        check_pickles(tmp_path / "bad")
    assert not (tmp_path / "ran").exists()
