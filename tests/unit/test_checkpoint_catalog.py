"""Which checkpoints are complete, which is the newest, which go: on folders of small files, without a model."""

from pathlib import Path

import pytest

from swiftcp.checkpoint.catalog import (
    Marker,
    checkpoints_folder,
    completed,
    find_best,
    find_latest,
    find_problems,
    next_number,
    point_best,
    point_latest,
    prune,
    record_file,
    remove_unfinished,
    step_folder,
)
from swiftcp.checkpoint.run_state import RunState
from swiftcp.errors import CheckpointError


def add_checkpoint(output_dir: Path, step: int) -> Path:
    """A complete checkpoint of two files."""
    folder = step_folder(output_dir, step)
    (folder / "inner").mkdir(parents=True)
    (folder / "__0_0.distcp").write_text(f"weights of step {step}")
    (folder / "inner" / "state").write_text("state")
    files = {name: record_file(folder / name) for name in ("__0_0.distcp", "inner/state")}
    Marker(next_number(output_dir), files).write(folder)
    return folder


def test_folders_sort_by_name_as_by_step(tmp_path):
    assert step_folder(tmp_path, 500) == tmp_path / "checkpoints" / "step-000500"
    assert step_folder(tmp_path, 1_234_567).name == "step-1234567"


def test_nothing_is_found_where_nothing_was_completed(tmp_path):
    assert find_latest(tmp_path) is None
    (tmp_path / "checkpoints" / "step-000005.incomplete").mkdir(parents=True)
    assert find_latest(tmp_path) is None


@pytest.mark.parametrize("pointer", [None, "", "garbage\n", "step-000009\n", "../../elsewhere\n", "step-000001\n"])
def test_case_33_the_newest_is_found_whatever_latest_says(tmp_path, pointer):
    add_checkpoint(tmp_path, 1)
    newest = add_checkpoint(tmp_path, 2)
    point_latest(newest)
    latest = tmp_path / "checkpoints" / "latest"
    assert latest.read_text() == "step-000002\n"
    latest.unlink() if pointer is None else latest.write_text(pointer)
    assert find_latest(tmp_path) == newest


def _flip_byte(file: Path) -> None:
    values = bytearray(file.read_bytes())
    values[3] ^= 1
    file.write_bytes(values)


DAMAGE = {
    "cut short": (lambda file: file.write_bytes(file.read_bytes()[:-1]), "has 16 bytes instead of 17"),
    "a byte flipped": (_flip_byte, "does not hold what was written"),
    "deleted": (Path.unlink, "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named_and_the_next_older_one_is_used(tmp_path, caplog, damage):
    older, newest = add_checkpoint(tmp_path, 1), add_checkpoint(tmp_path, 2)
    harm, message = DAMAGE[damage]
    harm(newest / "__0_0.distcp")
    assert find_latest(tmp_path) == older
    assert f"{newest / '__0_0.distcp'} {message}" in caplog.text
    with pytest.raises(CheckpointError, match="resume_strict"):
        find_latest(tmp_path, strict=True)


def test_case_33_a_stray_folder_with_a_higher_number_is_passed_over(tmp_path, caplog):
    whole = add_checkpoint(tmp_path, 1)
    (step_folder(tmp_path, 9)).mkdir()
    (step_folder(tmp_path, 8)).mkdir()
    (step_folder(tmp_path, 8) / "complete.json").write_text('{"number": 7, "files": {"a": 1}}')
    assert find_latest(tmp_path) == whole
    assert "step-000009/complete.json is missing" in caplog.text
    assert "step-000008/complete.json is missing or cannot be read" in caplog.text


def test_no_silent_start_from_scratch_when_every_checkpoint_is_damaged(tmp_path):
    for step in (1, 2):
        (add_checkpoint(tmp_path, step) / "inner" / "state").unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is whole(.|\n)*step-000002(.|\n)*step-000001"):
        find_latest(tmp_path)


def test_the_newest_is_the_one_saved_last_also_at_an_older_step(tmp_path):
    """A run that was sent back to step 2 has left steps 3 and 4 behind; they are neither resumed nor do they push it out."""
    for step in (3, 4):
        add_checkpoint(tmp_path, step)
    current = add_checkpoint(tmp_path, 2)
    assert find_latest(tmp_path) == current
    prune(tmp_path, 2)
    assert completed(tmp_path) == [step_folder(tmp_path, 4), current]


def test_pruning_keeps_the_newest_and_what_is_not_ours(tmp_path):
    for step in (1, 2, 3, 10):
        add_checkpoint(tmp_path, step)
    stray = step_folder(tmp_path, 5)
    stray.mkdir()
    prune(tmp_path, 2)
    assert completed(tmp_path) == [step_folder(tmp_path, 3), step_folder(tmp_path, 10)]
    assert stray.is_dir()
    assert sorted(path.name for path in stray.parent.iterdir()) == ["step-000003", "step-000005", "step-000010"]


def evaluated(checkpoint: Path, eval_loss: float | None) -> Path:
    state = RunState(step=1, epoch=0, global_batches=1, samples=1, tokens=1, labelled_tokens=1, plan_hash="", eval_loss=eval_loss)
    (checkpoint / "state.json").write_text(state.to_json())
    return checkpoint


def test_best_names_the_lowest_loss_of_those_saved_and_is_never_pruned(tmp_path):
    losses = {1: 3.0, 2: 1.5, 3: None, 4: 1.5, 5: 2.0}
    pointer = checkpoints_folder(tmp_path) / "best"
    for step, loss in losses.items():
        evaluated(add_checkpoint(tmp_path, step), loss)
        point_best(tmp_path)
        assert pointer.read_text() == ("step-000001\n" if step == 1 else "step-000002\n")
    prune(tmp_path, 1)
    assert completed(tmp_path) == [step_folder(tmp_path, 2), step_folder(tmp_path, 5)]
    assert find_best(tmp_path) == step_folder(tmp_path, 2)


def test_without_an_evaluation_nothing_is_best(tmp_path):
    evaluated(add_checkpoint(tmp_path, 1), None)
    (add_checkpoint(tmp_path, 2) / "state.json").write_text("damaged")
    (checkpoints_folder(tmp_path) / "best").write_text("step-000009\n")
    point_best(tmp_path)
    assert find_best(tmp_path) is None
    assert not (checkpoints_folder(tmp_path) / "best").exists()


def test_what_a_crash_left_behind_is_removed(tmp_path):
    whole = add_checkpoint(tmp_path, 1)
    for name in ("step-000002.incomplete", "step-000001.replaced.incomplete"):
        (tmp_path / "checkpoints" / name / "inner").mkdir(parents=True)
    remove_unfinished(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [whole]
    assert not find_problems(whole)
