"""Weights of a real tiny Qwen3-VL: through our model and back, and what `transformers` makes of the result."""

import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit import folders
from tests.unit.folders import assert_same_bits, read_folder

# (tied, number of ranks)
LAYOUTS = [(False, 1), (True, 2)]


def export_untrained(folder: Path, output: Path, cp_size: int) -> None:
    from swiftcp.checkpoint.hf_writer import export_hf_folder
    from swiftcp.parallel.cpu_shim import cpu_mode, install
    from tests.distributed.model_harness import build

    install()
    with cpu_mode():
        model, _, family = build(folder, cp_size)
        from transformers import AutoConfig

        export_hf_folder(model, folder, output, family.name_table(AutoConfig.from_pretrained(folder)), max_shard_bytes=200_000)


def load_and_export_parts(folder: Path, output: Path, tied: bool, tp_size: int) -> None:
    """On each rank: fill its part of the stand-in model, tensor parallel within pipeline stages, and export all parts."""
    import torch.distributed as dist

    from swiftcp.checkpoint.hf_reader import load_hf_folder
    from swiftcp.checkpoint.hf_writer import export_hf_folder
    from swiftcp.models.qwen3_vl.names import qwen3_vl_name_table
    from swiftcp.parallel.place import TensorPlace
    from tests.unit import folders

    stage, tp_rank = divmod(dist.get_rank(), tp_size)
    part = folders.model_part(tied, tp_size=tp_size, stage=stage, num_stages=dist.get_world_size() // tp_size)
    table, place = qwen3_vl_name_table(folders.config(tied)), TensorPlace(tp_rank, tp_size)
    load_hf_folder([part], folder, table, place)
    assert not any(parameter.isnan().any() for parameter in part.parameters())
    export_hf_folder([part], folder, output, table, place, max_shard_bytes=2_000)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("tp_size", "num_ranks"), [(2, 2), (1, 2), (2, 4)])
def test_case_30_parts_of_ranks_round_trip_equal_to_the_bit(ranks, tmp_path, tied, tp_size, num_ranks):
    """199 rows of vocabulary padded to 200, so that tensor-parallel ranks have 100 and 99."""
    folder, output = folders.write_folder(tmp_path / "source", folders.tensors(tied), num_shards=3), tmp_path / "output"
    ranks.run(load_and_export_parts, folder, output, tied, tp_size, num_ranks=num_ranks)
    assert len(list(output.glob("*.safetensors"))) > 1
    assert_same_bits(read_folder(output), read_folder(folder))
    assert {stat.S_IMODE(path.stat().st_mode) for path in output.iterdir()} == {stat.S_IMODE((folder / "config.json").stat().st_mode)}


def tiny(folder: Path, tied: bool) -> Path:
    from swiftcp.models.tiny import write_tiny

    write_tiny("qwen3_vl", folder, tie_word_embeddings=tied)
    return folder


@pytest.mark.parametrize(("tied", "num_ranks"), LAYOUTS)
def test_case_30_round_trip_through_the_model_is_equal_to_the_bit(ranks, tmp_path, tied, num_ranks):
    folder, output = tiny(tmp_path / "tiny", tied), tmp_path / "output"
    ranks.run(export_untrained, folder, output, num_ranks, num_ranks=num_ranks)
    assert len(list(output.glob("*.safetensors"))) > 1
    assert_same_bits(read_folder(output), read_folder(folder))


def test_transformers_reads_the_export_and_writes_the_same_keys(ranks, tmp_path, tiny_qwen3_vl):
    from transformers import Qwen3VLForConditionalGeneration

    ranks.run(export_untrained, tiny_qwen3_vl, tmp_path / "output", 1, num_ranks=1)
    model, report = Qwen3VLForConditionalGeneration.from_pretrained(tmp_path / "output", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    model.save_pretrained(tmp_path / "saved")
    assert_same_bits(read_folder(tmp_path / "saved"), read_folder(tmp_path / "output"))


def test_the_base_model_layout_that_transformers_reads_is_read(ranks, tmp_path, tiny_qwen3_vl):
    from transformers import Qwen3VLForConditionalGeneration

    stored = read_folder(tiny_qwen3_vl)
    older = tmp_path / "older"
    older.mkdir()
    (older / "config.json").write_bytes((tiny_qwen3_vl / "config.json").read_bytes())
    save_file({name.removeprefix("model."): tensor for name, tensor in stored.items()}, older / "model.safetensors", {"format": "pt"})
    oracle = Qwen3VLForConditionalGeneration.from_pretrained(older).state_dict()
    ranks.run(export_untrained, older, tmp_path / "output", 1, num_ranks=1)
    written = read_folder(tmp_path / "output")
    assert_same_bits(written, stored)
    assert all(torch.equal(oracle[name], tensor) for name, tensor in written.items())
