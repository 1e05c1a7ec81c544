"""A resumed run is the uninterrupted one, to the bit; under another layout, to 1e-5; and a failed save fails everywhere."""

import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from swiftcp.checkpoint.catalog import completed, find_problems, step_folder
from tests.distributed import checkpoint_harness
from tests.distributed.checkpoint_harness import Recipe, Record, run
from tests.distributed.ranks import RankError

NO_SAVES = Path("/nonexistent")
RECIPES = {
    "cp1": (Recipe(), 1),
    "cp2": (Recipe(cp_size=2), 2),
    "dp2": (Recipe(), 2),
    "frozen_tower": (Recipe(values={"freeze_vit": True}), 1),
    "two_learning_rates": (Recipe(two_learning_rates=True), 1),
    "bfloat16": (Recipe(values={"torch_dtype": "bfloat16"}), 1),
    "async_save": (Recipe(async_save=True), 2),
}


def uninterrupted(ranks: Any, folder: Path, recipe: Recipe, num_ranks: int, until: int = 6) -> list[list[Record]]:
    return ranks.run(run, folder, NO_SAVES, until, replace(recipe, save_steps=100), num_ranks=num_ranks)


@pytest.mark.parametrize("name", RECIPES)
def test_case_34_two_resumes_are_bitwise_the_uninterrupted_run(ranks, tiny_qwen3_vl, tmp_path, name):
    """Losses, gradient norms, learning rates, weight decay and every random number."""
    recipe, num_ranks = RECIPES[name]
    expected = uninterrupted(ranks, tiny_qwen3_vl, recipe, num_ranks)
    legs = [ranks.run(run, tiny_qwen3_vl, tmp_path, until, recipe, num_ranks=num_ranks) for until in (2, 4, 6)]
    for rank in range(num_ranks):
        assert [record for leg in legs for record in leg[rank]] == expected[rank]
    assert len(set(expected[0][0].learning_rates)) == (2 if name == "two_learning_rates" else 1)
    assert [path.name for path in completed(tmp_path)] == ["step-000002", "step-000004", "step-000006"]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000006\n"


@pytest.mark.parametrize(("saved", "resumed"), [("cp2", "cp1"), ("cp1", "dp2"), ("dp2", "cp2")])
def test_a_run_goes_on_under_another_layout(ranks, tiny_qwen3_vl, tmp_path, saved, resumed):
    (first, first_ranks), (second, second_ranks) = RECIPES[saved], RECIPES[resumed]
    expected = uninterrupted(ranks, tiny_qwen3_vl, first, first_ranks)[0][2:]
    ranks.run(run, tiny_qwen3_vl, tmp_path, 2, first, num_ranks=first_ranks)
    got = ranks.run(run, tiny_qwen3_vl, tmp_path, 6, second, num_ranks=second_ranks)[0]
    assert [record.learning_rates for record in got] == [record.learning_rates for record in expected]
    losses = [[float.fromhex(record.loss) for record in records] for records in (got, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_random_states_of_another_layout_are_not_taken_over(ranks, tiny_qwen3_vl, tmp_path):
    """Tensor-parallel ranks draw alike where they have the same values; the data-parallel ones that saved did not."""
    ranks.run(run, tiny_qwen3_vl, tmp_path, 2, Recipe(), num_ranks=2)
    got = ranks.run(run, tiny_qwen3_vl, tmp_path, 3, Recipe(layout={"tensor_model_parallel_size": 2}), num_ranks=2)
    assert got[0][0].draws[2] == got[1][0].draws[2]


def test_without_the_optimizer_weights_and_schedule_go_on_and_moments_begin_anew(ranks, tiny_qwen3_vl, tmp_path):
    """Float32 masters of bfloat16 weights are made from the weights."""
    recipe = Recipe(with_optimizer=False, values={"torch_dtype": "bfloat16"})
    expected = uninterrupted(ranks, tiny_qwen3_vl, recipe, 1)[0][2:]
    ranks.run(run, tiny_qwen3_vl, tmp_path, 2, recipe, num_ranks=1)
    ranks.run(run, tiny_qwen3_vl, tmp_path / "with", 2, replace(recipe, with_optimizer=True), num_ranks=1)
    got = ranks.run(run, tiny_qwen3_vl, tmp_path, 6, recipe, num_ranks=1)[0]
    assert got[0] == expected[0], "the third step's loss and gradient are those of the saved weights"
    assert [record.learning_rates for record in got] == [record.learning_rates for record in expected]
    assert got[1].loss != expected[1].loss
    sizes = [sum(file.stat().st_size for file in step_folder(run_dir, 2).glob("*.distcp")) for run_dir in (tmp_path, tmp_path / "with")]
    assert 2 * sizes[0] < sizes[1]


def test_the_limit_keeps_the_newest(ranks, tiny_qwen3_vl, tmp_path):
    ranks.run(run, tiny_qwen3_vl, tmp_path, 4, Recipe(save_steps=1, save_total_limit=2), num_ranks=1)
    assert [path.name for path in completed(tmp_path)] == ["step-000003", "step-000004"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000003", "step-000004"]


def test_a_recipe_that_changes_the_result_is_refused(ranks, tiny_qwen3_vl, tmp_path):
    ranks.run(run, tiny_qwen3_vl, tmp_path, 2, Recipe(values={"lr": 1e-3}), num_ranks=2)
    with pytest.raises(RankError, match=r"ConfigError: the recipe differs(.|\n)*lr: 0.001 there, 0.002 now"):
        ranks.run(run, tiny_qwen3_vl, tmp_path, 2, Recipe(values={"lr": 2e-3}), num_ranks=2)


def _fail_on_a_rank(failing_rank: int, target: str, folder: Path, output_dir: Path, recipe: Recipe) -> tuple[str, int]:
    """Run on to step 5 with one function of the save failing on one rank; returns the error of this rank, and the steps that it made."""
    import torch.distributed as dist

    from swiftcp.errors import CheckpointError

    counted = patch("tests.distributed.checkpoint_harness._step", wraps=checkpoint_harness._step).start()
    failing = patch(target, side_effect=OSError("no space left on device"))
    if dist.get_rank() == failing_rank:
        failing.start()
    try:
        run(folder, output_dir, 5, recipe)
    except (CheckpointError, OSError) as error:
        return f"{type(error).__name__}: {error}", counted.call_count
    finally:
        patch.stopall()
    return "saved", counted.call_count


@pytest.mark.parametrize("recipe", [Recipe(), Recipe(async_save=True)])
@pytest.mark.parametrize(
    ("failing_rank", "target", "named"),
    [
        (0, "swiftcp.checkpoint.resumable.save_random_states", "no space left on device"),
        (1, "swiftcp.checkpoint.resumable.save_random_states", "no space left on device"),
        (1, "megatron.core.dist_checkpointing.strategies.filesystem_async._write_item", r"could not be written \(.* GiB are free there\)"),
    ],
)
def test_a_failure_on_one_rank_raises_on_all_and_leaves_what_was_there(ranks, tiny_qwen3_vl, tmp_path, recipe, failing_rank, target, named):
    ranks.run(run, tiny_qwen3_vl, tmp_path, 2, Recipe(), num_ranks=2)
    errors, num_steps = zip(*ranks.run(_fail_on_a_rank, failing_rank, target, tiny_qwen3_vl, tmp_path, recipe, num_ranks=2), strict=True)
    assert num_steps in ((2, 2), (3, 3)), "all ranks stop behind the same step"
    assert all(re.match("CheckpointError|OSError", error) for error in errors), errors
    assert all(re.search(named, error) for error in errors), errors
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-000002"]
    assert not find_problems(step_folder(tmp_path, 2))
    assert ranks.run(run, tiny_qwen3_vl, tmp_path, 4, Recipe(), num_ranks=2)[0][0].step == 3


def _save_beside_steps(folder: Path, output_dir: Path) -> None:
    """On two ranks, the second of which writes late: what is saved is from before the steps that are made meanwhile."""
    import torch.distributed as dist

    from swiftcp.checkpoint import resumable
    from swiftcp.checkpoint.run_state import RunState
    from swiftcp.parallel.cpu_shim import cpu_mode

    def state(step: int) -> RunState:
        return RunState(step, 0, step, 0, 0, 0, "plan", {})

    def held_back(pending: resumable._Pending) -> None:
        gate.wait()
        write(pending)

    gate, write, late = threading.Event(), resumable._write, dist.get_rank() == 1
    with cpu_mode(), patch.object(resumable, "_write", held_back):
        training = checkpoint_harness._start(folder, Recipe())
        parts, group = (training.wrapped, training.optimizer, training.scheduler), training.mesh.dp_cp_group
        checkpoint_harness._step(training, 0)
        gate.set()
        saver = resumable.Saver(output_dir, *parts, dp_cp_group=group, save_total_limit=1, in_background=True)
        saver.save(state(1))
        saver.wait()
        gate.clear()
        checkpoint_harness._step(training, 1)
        expected = weights_and_moments(training)
        saver.save(state(2))
        for step in (2, 3):
            checkpoint_harness._step(training, step)
            if not late:
                gate.set()
                saver._pending.written.result()
            saver.poll()
            assert completed(output_dir) == [step_folder(output_dir, 1)], "completed before all ranks have written"
        gate.set()
        saver.save(state(4))
        assert completed(output_dir) == [step_folder(output_dir, 2)], "a save waits for the one before"
        assert not any(map(torch.equal, weights_and_moments(training), expected))
        resumable.load_checkpoint(step_folder(output_dir, 2), *parts, dp_cp_group=group, fingerprint={})
        assert all(map(torch.equal, weights_and_moments(training), expected))
        saver.wait()


def weights_and_moments(training: Any) -> list[torch.Tensor]:
    inner = training.optimizer.optimizer
    parameters = [parameter for group in inner.param_groups for parameter in group["params"]]
    moments = [inner.state[parameter][name] for parameter in parameters for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach().clone() for tensor in (*parameters, *moments)]


def test_row_7_a_save_beside_the_training_holds_the_values_from_before_the_next_step(ranks, tiny_qwen3_vl, tmp_path):
    ranks.run(_save_beside_steps, tiny_qwen3_vl, tmp_path, num_ranks=2)
    assert [path.name for path in completed(tmp_path)] == ["step-000004"]


def test_the_best_is_kept_beside_the_newest(ranks, tiny_qwen3_vl, tmp_path):
    recipe = Recipe(save_steps=1, save_total_limit=1, eval_losses=(2.0, 1.0, None, 3.0))
    ranks.run(run, tiny_qwen3_vl, tmp_path, 4, recipe, num_ranks=1)
    assert [path.name for path in completed(tmp_path)] == ["step-000002", "step-000004"]
    assert (tmp_path / "checkpoints" / "best").read_text() == "step-000002\n"


def _flip_byte(file: Path) -> None:
    values = bytearray(file.read_bytes())
    values[len(values) // 2] ^= 1
    file.write_bytes(values)


def test_a_damaged_checkpoint_is_passed_over_and_written_again(ranks, tiny_qwen3_vl, tmp_path):
    expected = uninterrupted(ranks, tiny_qwen3_vl, Recipe(), 1, until=4)[0]
    ranks.run(run, tiny_qwen3_vl, tmp_path, 4, Recipe(), num_ranks=1)
    _flip_byte(next(step_folder(tmp_path, 4).glob("*.distcp")))
    got = ranks.run(run, tiny_qwen3_vl, tmp_path, 4, Recipe(), num_ranks=1)[0]
    assert got == expected[2:]
    assert not find_problems(step_folder(tmp_path, 4))
