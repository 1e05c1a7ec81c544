"""What of a recipe must stay the same for a run to go on, and where it goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swiftcp.checkpoint.run_state import RunState
from swiftcp.config.concerns import TrainConfig
from swiftcp.data.plan import StepPlan
from swiftcp.errors import ConfigError
from swiftcp.trainers.resume import NEUTRAL_KEYS, find_checkpoint, fingerprint, first_state, place_in_epoch, saved_step

LENGTHS = [30, 10, 60, 20, 50, 40, 10, 30, 20, 60]


def plan(lengths: list[int] = LENGTHS, **values: Any) -> StepPlan:
    fixed: dict[str, Any] = dict(seed=1, global_batch_size=2, packing_length=64, pack_align=2)
    return StepPlan(lengths, **{**fixed, "num_train_epochs": 3, **values})


def source(folder: Path, template: str = "template") -> Any:
    return SimpleNamespace(folder=folder, processor=SimpleNamespace(chat_template=template))


def config(**values: Any) -> TrainConfig:
    return TrainConfig(**{"model": "m", "dataset": ["d"], **values})


def rows_before(step: int, of: StepPlan) -> int:
    return sum(len(pack) for earlier in range(step) for pack in of.step(earlier))


def saved(folder: Path, recipe: dict[str, Any], step: int, **more: Any) -> Path:
    counters = dict(step=step, epoch=0, global_batches=0, samples=rows_before(step, plan()), tokens=0, labelled_tokens=0)
    state = RunState(**counters, plan_hash="", fingerprint=recipe, **more)
    (folder / "state.json").write_text(state.to_json())
    return folder


def test_neutral_keys_are_keys() -> None:
    assert TrainConfig.model_fields.keys() >= NEUTRAL_KEYS


@pytest.mark.parametrize("change", [{"context_parallel_size": 2}, {"save_steps": 7}, {"num_train_epochs": 5}, {"micro_batch_size": 2}])
def test_layout_length_and_saving_may_change(change: dict[str, Any], tmp_path: Path) -> None:
    recipe = fingerprint(config(), "sft", plan(), source(tmp_path), "rows")
    checkpoint = saved(tmp_path, recipe, step=4)
    assert (
        saved_step(
            checkpoint, fingerprint(config(**change), "sft", plan(num_train_epochs=5), source(tmp_path), "rows"), plan(num_train_epochs=5)
        )
        == 4
    )


@pytest.mark.parametrize(("change", "key"), [({"lr": 1e-3}, "lr"), ({"seed": 7}, "seed"), ({"freeze_vit": True}, "freeze_vit")])
def test_what_changes_the_result_may_not(change: dict[str, Any], key: str, tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, fingerprint(config(), "sft", plan(), source(tmp_path), "rows"), step=4)
    with pytest.raises(ConfigError, match=f"{key}: .* there, .* now"):
        saved_step(checkpoint, fingerprint(config(**change), "sft", plan(), source(tmp_path), "rows"), plan())


def test_without_an_optimizer_a_run_goes_on_only_if_the_recipe_says_so(tmp_path: Path) -> None:
    recipe = fingerprint(config(no_save_optim=True), "sft", plan(), source(tmp_path), "rows")
    checkpoint = saved(tmp_path, recipe, step=4, has_optimizer=False)
    with pytest.raises(ConfigError, match="holds no optimizer: set no_load_optim true"):
        saved_step(checkpoint, recipe, plan())
    again = fingerprint(config(no_load_optim=True), "sft", plan(), source(tmp_path), "rows")
    assert saved_step(checkpoint, again, plan(), no_load_optim=True) == 4


def test_other_data_or_another_template_are_refused(tmp_path: Path) -> None:
    checkpoint = saved(tmp_path, fingerprint(config(), "sft", plan(), source(tmp_path), "rows"), step=4)
    others = {
        "data": fingerprint(config(), "sft", plan([*LENGTHS[:-1], 61]), source(tmp_path), "rows"),
        "chat_template": fingerprint(config(), "sft", plan(), source(tmp_path, "another"), "rows"),
        "rows": fingerprint(config(), "sft", plan(), source(tmp_path), "other rows"),
        "mode": fingerprint(config(), "pt", plan(), source(tmp_path), "rows"),
    }
    for key, recipe in others.items():
        with pytest.raises(ConfigError, match=f"{key}: "):
            saved_step(checkpoint, recipe, plan())


def test_a_new_run_begins_at_step_0(tmp_path: Path) -> None:
    recipe = fingerprint(config(), "sft", plan(), source(tmp_path), "rows")
    assert saved_step(None, recipe, plan()) == 0
    assert find_checkpoint(config(output_dir=str(tmp_path))) is None
    state = first_state(recipe)
    assert (state.step, state.tokens, state.plan_hash) == (0, 0, recipe["data"])


def test_place_in_epoch_counts_the_steps_that_began_in_it() -> None:
    steps = plan(packing_length=None, global_batch_size=4)  # 10 rows: epochs begin in front of packs 0, 10 and 20
    places = [place_in_epoch(steps, step) for step in range(steps.num_steps + 1)]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0)]


def test_a_longer_run_that_fills_an_earlier_step_anew_is_refused(tmp_path: Path) -> None:
    """One epoch of three packs leaves a step of four with a filler; two epochs put a row there."""
    short, long = (plan([60, 60, 60], num_train_epochs=epochs, global_batch_size=4) for epochs in (1, 2))
    assert (rows_before(1, short), rows_before(1, long)) == (3, 4)
    recipe = fingerprint(config(), "sft", short, source(tmp_path), "rows")
    state = RunState(step=1, epoch=1, global_batches=0, samples=3, tokens=0, labelled_tokens=0, plan_hash="", fingerprint=recipe)
    (tmp_path / "state.json").write_text(state.to_json())
    assert saved_step(tmp_path, recipe, short) == 1
    with pytest.raises(ConfigError, match=r"1 steps of 3 rows, .* fills with 4"):
        saved_step(tmp_path, fingerprint(config(), "sft", long, source(tmp_path), "rows"), long)
