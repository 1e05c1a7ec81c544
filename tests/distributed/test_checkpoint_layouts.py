"""A run saved under one layout goes on under any other: the same losses, whatever the ranks hold."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import checkpoint_harness
from tests.distributed.checkpoint_harness import Recipe
from tests.distributed.ranks import RankPool

LAYOUTS = {
    "one rank": (Recipe(), 1),
    "CP2": (Recipe(cp_size=2), 2),
    "DP2": (Recipe(), 2),
    "TP2": (Recipe(layout={"tensor_model_parallel_size": 2, "sequence_parallel": True}), 2),
    "PP2": (Recipe(layout={"pipeline_model_parallel_size": 2}), 2),
}
CP2_WHOLE = {"CP2, whole": (Recipe(cp_size=2, layout={"cp_partition_mode": "whole"}), 2)}
"""In every third step the rows of a pack stay whole on a rank each."""
SAVED_STEP, NUM_STEPS = 2, 4
RELATIVE = 1e-5
"""Of losses in float32; then Adam makes steps of what is rounding in a true zero."""


def save_and_go_on(folder: Path, output_dir: Path, recipe: Recipe) -> list[float]:
    """On each rank: train, save, and go on without a stop; the losses behind the save."""
    return [float.fromhex(record.loss) for record in checkpoint_harness.run(folder, output_dir, SAVED_STEP + NUM_STEPS, recipe)][
        SAVED_STEP:
    ]


def go_on_from_each(folder: Path, checkpoints: dict[str, Path], recipe: Recipe) -> dict[str, list[float]]:
    """On each rank: the losses behind each of the checkpoints, one after the other on one model."""
    from swiftcp.checkpoint.resumable import load_checkpoint
    from swiftcp.parallel.cpu_shim import cpu_mode

    losses = {}
    with cpu_mode():
        training = checkpoint_harness._start(folder, recipe)
        parts, group = (training.wrapped, training.optimizer, training.scheduler), training.mesh.dp_cp_group
        for name, checkpoint in checkpoints.items():
            step = load_checkpoint(checkpoint, *parts, dp_cp_group=group, fingerprint=recipe.fingerprint).step
            assert step == SAVED_STEP
            records = [checkpoint_harness._step(training, step + further) for further in range(NUM_STEPS)]
            losses[name] = [float.fromhex(record.loss) for record in records]
    return losses


def table(differences: dict[str, dict[str, float]]) -> str:
    """Markdown: layouts that saved down, layouts that went on across, largest relative difference of a loss."""
    names = list(differences)
    lines = [f"| saved under | {' | '.join(f'{name} goes on' for name in names)} |", "| --- " * (len(names) + 1) + "|"]
    lines += [f"| {saved} | " + " | ".join(f"{row[resumed]:.1e}" for resumed in names) + " |" for saved, row in differences.items()]
    return "\n".join(lines)


@pytest.fixture(scope="module")
def tiny_tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose head is its embedding: a last pipeline stage has a copy of it."""
    from swiftcp.models.tiny import write_tiny

    folder = tmp_path_factory.mktemp("tied") / "tiny"
    write_tiny("qwen3_vl", folder, tie_word_embeddings=True)
    return folder


@pytest.mark.parametrize(("saved", "resumed"), [("PP2", "TP2"), ("one rank", "PP2"), ("CP2", "CP2, whole")])
def test_row_13_with_a_tied_head_a_run_goes_on_under_another_layout(
    ranks: RankPool, tiny_tied: Path, tmp_path: Path, saved: str, resumed: str
) -> None:
    (first, first_ranks), (second, second_ranks) = LAYOUTS[saved], (LAYOUTS | CP2_WHOLE)[resumed]
    expected = ranks.run(save_and_go_on, tiny_tied, tmp_path, first, num_ranks=first_ranks)[0]
    checkpoint = tmp_path / "checkpoints" / f"step-{SAVED_STEP:06d}"
    losses = ranks.run(go_on_from_each, tiny_tied, {saved: checkpoint}, second, num_ranks=second_ranks)[0][saved]
    assert losses == pytest.approx(expected, rel=RELATIVE)


@pytest.fixture(scope="module")
def odd_vocabulary(eight_layers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder without weights whose vocabulary, and head of its own, divide by nothing."""
    folder = tmp_path_factory.mktemp("odd") / "tiny"
    shutil.copytree(eight_layers, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    described = json.loads((folder / "config.json").read_text())
    described["text_config"]["vocab_size"] += 1
    described["tie_word_embeddings"] = described["text_config"]["tie_word_embeddings"] = False
    (folder / "config.json").write_text(json.dumps(described))
    return folder


def test_chunks_and_a_padded_vocabulary_go_on_under_another_layout(ranks: RankPool, odd_vocabulary: Path, tmp_path: Path) -> None:
    """Layers leave the chunks of two stages for one, and the rows that fill up the vocabulary come and go, their moments too."""
    random = {"init_from_config": True}
    chunks = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    layouts = {
        "chunks": Recipe(values=random, layout=chunks),
        "TP2": Recipe(values=random, layout={"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    }
    for saved, resumed in itertools.permutations(layouts):
        expected = ranks.run(save_and_go_on, odd_vocabulary, tmp_path / saved, layouts[saved], num_ranks=2)[0]
        checkpoint = tmp_path / saved / "checkpoints" / f"step-{SAVED_STEP:06d}"
        losses = ranks.run(go_on_from_each, odd_vocabulary, {saved: checkpoint}, layouts[resumed], num_ranks=2)[0][saved]
        assert losses == pytest.approx(expected, rel=RELATIVE), f"saved under {saved}"


EXPERTS = {
    "EP2+CP2": Recipe(cp_size=2, layout={"expert_model_parallel_size": 2}),
    "TP2+SP, experts cut": Recipe(
        layout={"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_tensor_parallel_size": 2},
    ),
}


def test_row_13_experts_go_on_wherever_they_lie(ranks: RankPool, tiny_qwen3_vl_moe: Path, tmp_path: Path) -> None:
    """Spread over context-parallel ranks, or each cut; then all on one rank, or spread over data-parallel ranks."""
    expected: dict[str, list[float]] = {}
    checkpoints: dict[str, Path] = {}
    for number, (name, recipe) in enumerate(EXPERTS.items()):
        expected[name] = ranks.run(save_and_go_on, tiny_qwen3_vl_moe, tmp_path / str(number), recipe, num_ranks=2)[0]
        checkpoints[name] = tmp_path / str(number) / "checkpoints" / f"step-{SAVED_STEP:06d}"
    for recipe, num_ranks in ((Recipe(), 1), (Recipe(layout={"expert_model_parallel_size": 2}), 2)):
        for saved, losses in ranks.run(go_on_from_each, tiny_qwen3_vl_moe, checkpoints, recipe, num_ranks=num_ranks)[0].items():
            assert losses == pytest.approx(expected[saved], rel=RELATIVE), saved


@pytest.mark.slow
def test_row_13_every_layout_goes_on_from_every_other(ranks: RankPool, tiny_qwen3_vl: Path, tmp_path: Path) -> None:
    expected: dict[str, list[float]] = {}
    checkpoints: dict[str, Path] = {}
    for number, (name, (recipe, num_ranks)) in enumerate(LAYOUTS.items()):
        output_dir = tmp_path / str(number)
        expected[name] = ranks.run(save_and_go_on, tiny_qwen3_vl, output_dir, recipe, num_ranks=num_ranks)[0]
        checkpoints[name] = output_dir / "checkpoints" / f"step-{SAVED_STEP:06d}"
    differences: dict[str, dict[str, Any]] = {name: {} for name in LAYOUTS}
    for resumed, (recipe, num_ranks) in LAYOUTS.items():
        for saved, losses in ranks.run(go_on_from_each, tiny_qwen3_vl, checkpoints, recipe, num_ranks=num_ranks)[0].items():
            pairs = zip(losses, expected[saved], strict=True)
            differences[saved][resumed] = max(abs(loss - other) / abs(other) for loss, other in pairs)
    print("\n" + table(differences))
    assert max(difference for row in differences.values() for difference in row.values()) <= RELATIVE, "\n" + table(differences)
