"""Whole runs: the same losses in every layout, exact resuming, stopping, errors that all ranks share, what is written."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.distributed.loop_harness import logged, run_sft, trained_packs
from tests.distributed.ranks import RankPool
from tests.training_rows import write_rows

RELATIVE = 1e-5
"""Of losses and gradient norms, between layouts, in float32."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows"), 30)


@pytest.fixture(scope="module")
def recipe(tiny_qwen3_vl: Path, rows: Path) -> dict[str, Any]:
    """Two epochs of about four steps each, the second of which begins within a step."""
    return {
        "model": str(tiny_qwen3_vl),
        "dataset": [str(rows)],
        "split_dataset_ratio": 0.2,
        "max_length": 144,
        "pack_align": 8,
        "global_batch_size": 4,
        "num_train_epochs": 2,
        "lr": 1e-3,
        "lr_warmup_iters": 2,
        "eval_steps": 3,
    }


def losses(output_dir: Path) -> list[tuple[int, str, str]]:
    return [(one["iteration"], one["loss"].hex(), one["grad_norm"].hex()) for one in logged(output_dir)]


def weights(output_dir: Path) -> bytes:
    return (output_dir / "hf" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def uninterrupted(ranks: RankPool, recipe: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output_dir = tmp_path_factory.mktemp("uninterrupted")
    assert ranks.run(run_sft, {**recipe, "output_dir": str(output_dir)}, num_ranks=1) == ["done"]
    return output_dir


LAYOUTS = {"cp2": (2, 2), "dp2": (1, 2), "cp2_dp2": (2, 4)}
"""Name: (context-parallel size, ranks)."""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_trains_as_one_rank_does(
    layout: str, ranks: RankPool, recipe: dict[str, Any], uninterrupted: Path, tmp_path: Path
) -> None:
    cp_size, num_ranks = LAYOUTS[layout]
    values = {**recipe, "context_parallel_size": cp_size, "output_dir": str(tmp_path)}
    assert ranks.run(run_sft, values, num_ranks=num_ranks) == ["done"] * num_ranks
    got, expected = logged(tmp_path), logged(uninterrupted)
    assert len(got) == len(expected) > 4
    for one, other in zip(got[:4], expected[:4], strict=True):  # then Adam makes steps of what is rounding in a true zero
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=RELATIVE)
        assert one["loss"] == pytest.approx(other["loss"], rel=RELATIVE)
    for one, other in zip(got, expected, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert ("eval_loss" in one) == ("eval_loss" in other) == (one["iteration"] % 3 == 0 or one["iteration"] == one["train_iters"])
        for key in ("iteration", "epoch", "lr", "tokens", "labelled_tokens", "pack_fill"):
            assert one[key] == other[key], key
    first_evaluation = next(one["eval_loss"] for one in got if "eval_loss" in one)
    assert first_evaluation == pytest.approx(next(one["eval_loss"] for one in expected if "eval_loss" in one), rel=RELATIVE)


def test_packs_are_the_same_for_context_parallel_sizes_1_and_2(ranks: RankPool, recipe: dict[str, Any]) -> None:
    [alone] = ranks.run(trained_packs, recipe, num_ranks=1)
    assert len(alone) > 8 and max(len(rows) for rows, *_ in alone) > 1
    for packs in ranks.run(trained_packs, {**recipe, "context_parallel_size": 2}, num_ranks=2):
        assert packs == alone
    first, again, second, _ = ranks.run(trained_packs, {**recipe, "context_parallel_size": 2}, num_ranks=4)
    together = [pack for pair in zip(first, second, strict=True) for pack in pair]
    assert first == again and len(together) == len(alone)
    for ours, theirs in zip(itertools.batched(together, 4), itertools.batched(alone, 4), strict=True):
        assert sorted(ours) == sorted(theirs), "data-parallel ranks share a step's packs by their cost"


def test_padded_rows_train_the_same_in_any_layout(ranks: RankPool, recipe: dict[str, Any], tmp_path: Path) -> None:
    """Without packing, micro-batches of other sizes and ranks still make the same steps, and see the same 7 validation rows."""
    changes = {"packing": False, "train_iters": 3, "eval_steps": 1, "val_dataset": [str(write_rows(tmp_path / "val", 7, first=100))]}
    values = {key: value for key, value in {**recipe, **changes}.items() if key not in ("num_train_epochs", "split_dataset_ratio")}
    layouts: dict[str, tuple[int, dict[str, Any]]] = {
        "one": (1, {}),
        "rows2_cp2": (2, {"micro_batch_size": 2, "context_parallel_size": 2}),
        "rows2_dp2": (2, {"micro_batch_size": 2}),
    }
    series = []
    for name, (num_ranks, layout) in layouts.items():
        answers = ranks.run(run_sft, {**values, **layout, "output_dir": str(tmp_path / name)}, num_ranks=num_ranks)
        assert answers == ["done"] * num_ranks
        series.append([(one["loss"], one["grad_norm"], one["eval_loss"]) for one in logged(tmp_path / name)])
    assert len(series[0]) == 3
    for other in series[1:]:
        for got, expected in zip(other, series[0], strict=True):
            assert got == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize("workers", [0, 2])
def test_stopped_twice_and_resumed_is_bitwise_the_uninterrupted_run(
    workers: int, ranks: RankPool, recipe: dict[str, Any], uninterrupted: Path, tmp_path: Path
) -> None:
    """Once within the first epoch, once within the second."""
    values = {**recipe, "output_dir": str(tmp_path), "dataloader_num_workers": workers}
    [first] = ranks.run(run_sft, values, "sft", 2, num_ranks=1)
    assert first.startswith("PreemptedError") and "saved step 2 of" in first
    [second] = ranks.run(run_sft, values, "sft", 3, num_ranks=1)
    assert second.startswith("PreemptedError") and "saved step 5 of" in second
    assert int(logged(tmp_path)[-1]["epoch"]) == 1
    assert ranks.run(run_sft, values, num_ranks=1) == ["done"]
    assert losses(tmp_path) == losses(uninterrupted)
    assert weights(tmp_path) == weights(uninterrupted)
    assert [one["tokens"] for one in logged(tmp_path)] == [one["tokens"] for one in logged(uninterrupted)]
    assert [one["eval_loss"] for one in logged(tmp_path) if "eval_loss" in one] == [
        one["eval_loss"] for one in logged(uninterrupted) if "eval_loss" in one
    ]


def test_learning_rates_of_parts_and_failing_events_survive_a_resume(ranks: RankPool, recipe: dict[str, Any], tmp_path: Path) -> None:
    """Groups of parameters find their moments again; where TensorBoard cannot write, the losses are the same."""
    values = {**recipe, "vit_lr": 1e-12, "aligner_lr": 5e-4, "train_iters": 4, "report_to": ["tensorboard"]}
    del values["num_train_epochs"]
    for name, stops in (("whole", [None]), ("stopped", [2, None])):
        output_dir = tmp_path / name
        if name == "stopped":
            output_dir.mkdir()
            (output_dir / "runs").write_text("in the way")
        for stop in stops:
            [answer] = ranks.run(run_sft, {**values, "output_dir": str(output_dir)}, "sft", stop, num_ranks=1)
            assert answer == "done" or (stop and "saved step 2 of 4" in answer)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    assert [one["lr"] for one in logged(tmp_path / "whole")][1:3] == [5e-4, 1e-3]  # warm-up of the language model
    assert list((tmp_path / "whole" / "runs").glob("events.*"))
    before = load_file(Path(recipe["model"]) / "model.safetensors")
    after = load_file(tmp_path / "whole" / "hf" / "model.safetensors")
    moved = {name for name in before if (after[name] - before[name]).abs().max() > 1e-6}
    assert not any("visual.blocks" in name for name in moved)
    assert any("visual.merger" in name for name in moved) and any("language_model" in name for name in moved)


def test_all_ranks_stop_at_the_same_step_and_another_layout_goes_on(
    ranks: RankPool, recipe: dict[str, Any], uninterrupted: Path, tmp_path: Path
) -> None:
    values = {**recipe, "output_dir": str(tmp_path)}
    answers = ranks.run(run_sft, {**values, "context_parallel_size": 2}, "sft", 2, 1, num_ranks=2)
    assert all("saved step 2 of" in answer for answer in answers)
    assert (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-000002"
    assert not (tmp_path / "hf").exists()
    assert ranks.run(run_sft, values, num_ranks=1) == ["done"]
    for got, expected in zip(logged(tmp_path)[:4], logged(uninterrupted)[:4], strict=True):
        assert got["loss"] == pytest.approx(expected["loss"], rel=RELATIVE)
        assert got["tokens"] == expected["tokens"]


def test_a_run_that_is_done_says_so_and_writes_the_weights_again(ranks: RankPool, recipe: dict[str, Any], uninterrupted: Path) -> None:
    before, series = load_file(uninterrupted / "hf" / "model.safetensors"), losses(uninterrupted)
    (uninterrupted / "hf" / "model.safetensors").unlink()
    assert ranks.run(run_sft, {**recipe, "output_dir": str(uninterrupted)}, num_ranks=1) == ["done"]
    after = load_file(uninterrupted / "hf" / "model.safetensors")
    assert before.keys() == after.keys() and all(before[name].equal(after[name]) for name in before)
    assert losses(uninterrupted) == series


def test_another_recipe_is_refused_before_anything_is_written(ranks: RankPool, recipe: dict[str, Any], uninterrupted: Path) -> None:
    written = (uninterrupted / "run_config.yaml").read_text()
    answers = ranks.run(run_sft, {**recipe, "output_dir": str(uninterrupted), "lr": 2e-3}, num_ranks=2)
    assert all(answer.startswith("ConfigError") and "lr: 0.001 there, 0.002 now" in answer for answer in answers)
    assert (uninterrupted / "run_config.yaml").read_text() == written


def test_bad_rows_are_the_same_error_on_every_rank(ranks: RankPool, recipe: dict[str, Any], tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows", 9)
    with file.open("a") as rows_file:
        rows_file.write('{"messages": [{"role": "user", "content": "<image>no image"}, {"role": "assistant", "content": "ok"}]}\n')
    values = {**recipe, "dataset": [str(file)], "split_dataset_ratio": 0.0, "output_dir": str(tmp_path / "run")}
    answers = ranks.run(run_sft, values, num_ranks=2)
    assert len(set(answers)) == 1 and answers[0].startswith("DataError") and f"{file}:10" in answers[0]
    assert not (tmp_path / "run").exists()
    assert ranks.run(run_sft, {**values, "strict": False, "num_train_epochs": 1}, num_ranks=2) == ["done", "done"]
    [bad_row] = [json.loads(line) for line in (tmp_path / "run" / "bad_rows.jsonl").read_text().splitlines()]
    assert bad_row["line"] == 10 and bad_row["reason"]


def test_a_run_writes_what_the_interface_names(uninterrupted: Path) -> None:
    assert {path.name for path in uninterrupted.iterdir()} - {"runs"} == {  # TensorBoard's events, where it is installed
        "run_config.yaml", "env.json", "command.txt", "logging.jsonl", "bad_rows.jsonl", "checkpoints", "hf"
    }  # fmt: skip
    records = logged(uninterrupted)
    last = records[-1]
    assert [one["iteration"] for one in records] == list(range(1, last["train_iters"] + 1))
    assert last["epoch"] == 2.0 and last["remaining_seconds"] == 0.0 and 0 < last["pack_fill"] <= 1
    assert records[0]["lr"] == 0.0 and records[2]["lr"] == pytest.approx(1e-3)
    assert last["loss"] < records[0]["loss"]
    keys = {"seconds", "elapsed_seconds", "memory_gib", "data_wait_fraction", "tokens_per_second_per_gpu", "eval_loss"}
    assert keys <= last.keys() and not {"mfu", "tflops_per_gpu", "skipped_steps"} & last.keys()


def test_random_weights_are_the_same_in_any_layout_and_need_no_weights(
    ranks: RankPool, recipe: dict[str, Any], tiny_qwen3_vl: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_qwen3_vl.iterdir():
        if path.suffix != ".safetensors":
            (model / path.name).write_bytes(path.read_bytes())
    values = {**recipe, "model": str(model), "init_from_config": True, "train_iters": 1, "lr_warmup_iters": 0}
    del values["num_train_epochs"]
    assert ranks.run(run_sft, {**values, "output_dir": str(tmp_path / "one")}, num_ranks=1) == ["done"]
    two_ranks = {**values, "output_dir": str(tmp_path / "two"), "context_parallel_size": 2}
    assert ranks.run(run_sft, two_ranks, num_ranks=2) == ["done", "done"]
    [one], [two] = logged(tmp_path / "one"), logged(tmp_path / "two")
    assert one["loss"] == pytest.approx(two["loss"], rel=RELATIVE)
    assert one["loss"] == pytest.approx(6.46, abs=0.1)  # the logarithm of 640 tokens
    assert load_file(tmp_path / "one" / "hf" / "model.safetensors").keys() == load_file(tiny_qwen3_vl / "model.safetensors").keys()


def test_weights_that_are_missing_are_an_error(ranks: RankPool, recipe: dict[str, Any], tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = tmp_path / "model"
    model.mkdir()
    for path in tiny_qwen3_vl.iterdir():
        if path.suffix != ".safetensors":
            (model / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tiny_qwen3_vl / "model.safetensors")
    del tensors["model.visual.merger.norm.weight"]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    [answer] = ranks.run(run_sft, {**recipe, "model": str(model), "output_dir": str(tmp_path / "run")}, num_ranks=1)
    assert answer.startswith("WeightsError") and "model.visual.merger.norm.weight" in answer


def test_pre_training_takes_texts(ranks: RankPool, recipe: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "the quick brown fox " * n}) + "\n" for n in range(1, 9)))
    values = {**recipe, "dataset": [str(file)], "split_dataset_ratio": 0.0, "output_dir": str(tmp_path / "run")}
    assert ranks.run(run_sft, values, "pt", num_ranks=1) == ["done"]
    first = logged(tmp_path / "run")[0]
    assert first["labelled_tokens"] == first["tokens"] - 8  # each text's first token is predicted by nothing
