"""Hugging Face folders in and out: equal to the bit untrained, and an error that names what does not fit."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from swiftcp.checkpoint.hf_reader import load_hf_folder
from swiftcp.checkpoint.hf_writer import export_hf_folder
from swiftcp.errors import ConfigError, WeightsError
from swiftcp.models.qwen3_vl.names import qwen3_vl_name_table
from swiftcp.parallel.place import TensorPlace
from tests.unit import folders
from tests.unit.folders import assert_same_bits, read_folder, write_folder

EMBEDDING, HEAD = "model.language_model.embed_tokens.weight", "lm_head.weight"
MIXED = (torch.bfloat16, torch.float32, torch.bfloat16, torch.float16, torch.float32)


def load(folder: Path, tied: bool = False, **kwargs) -> nn.Module:
    model = folders.model(tied, **kwargs)
    load_hf_folder(model, folder, qwen3_vl_name_table(folders.config(tied)))
    return model


def round_trip(folder: Path, tied: bool = False, max_shard_bytes: int = 10**9, **kwargs) -> Path:
    output = folder.with_name("output")
    export_hf_folder(
        load(folder, tied, **kwargs), folder, output, qwen3_vl_name_table(folders.config(tied)), max_shard_bytes=max_shard_bytes
    )
    return output


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_case_30_untrained_round_trip_is_equal_to_the_bit(tmp_path, tied, fused, num_shards):
    stored = folders.tensors(tied)
    output = round_trip(write_folder(tmp_path / "source", stored, num_shards), tied, fused=fused)
    assert_same_bits(read_folder(output), stored)


def test_case_31_vocabulary_padding_is_zero_inside_and_absent_outside(tmp_path):
    stored = folders.tensors()
    folder = write_folder(tmp_path / "source", stored)
    embedding = load(folder).get_parameter("language_model.embedding.word_embeddings.weight")
    assert embedding.shape[0] == 200
    assert torch.equal(embedding[:199], stored[EMBEDDING])
    assert embedding[199].tolist() == [0.0] * folders.HIDDEN
    assert read_folder(round_trip(folder))[EMBEDDING].shape[0] == 199


@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
def test_case_32_each_tensor_keeps_its_own_type(tmp_path, model_dtype):
    stored = folders.tensors(dtypes=MIXED)
    folder = write_folder(tmp_path / "source", stored)
    model = load(folder, dtype=model_dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {model_dtype}
    assert_same_bits(read_folder(round_trip(folder, dtype=model_dtype)), stored)


def test_trained_values_are_written_in_the_type_of_the_source(tmp_path):
    folder = write_folder(tmp_path / "source", folders.tensors(dtypes=(torch.bfloat16,)))
    model = load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    export_hf_folder(model, folder, tmp_path / "output", qwen3_vl_name_table(folders.config()))
    expected = {name: (tensor.float() * 1.5).bfloat16() for name, tensor in read_folder(folder).items()}
    assert_same_bits(read_folder(tmp_path / "output"), expected)


def test_shards_stay_under_the_limit_and_the_index_names_them_all(tmp_path):
    stored = folders.tensors()
    limit = 2000
    output = round_trip(write_folder(tmp_path / "source", stored), max_shard_bytes=limit)
    index = json.loads((output / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in output.glob("*.safetensors"))
    assert_same_bits(read_folder(output), stored)
    assert index["weight_map"].keys() == stored.keys()
    assert sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert index["metadata"]["total_parameters"] == sum(t.numel() for t in stored.values())
    sizes = {file: [t.nbytes for name, t in stored.items() if index["weight_map"][name] == file] for file in files}
    assert all(sum(size) <= limit or len(size) == 1 for size in sizes.values())


def test_files_that_are_no_weights_are_copied_byte_for_byte(tmp_path):
    folder = write_folder(tmp_path / "source", folders.tensors(), num_shards=2)
    (folder / "LICENSE").write_text("free")
    (folder / "modelling_code.py").write_text("raise SystemExit")
    (folder / "optimizer.pt").write_bytes(b"0")
    output = round_trip(folder)
    same = ["LICENSE", "chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"]
    assert sorted(path.name for path in output.iterdir()) == sorted([*same, "model.safetensors"])
    assert all((output / name).read_bytes() == (folder / name).read_bytes() for name in same)


@pytest.mark.parametrize(
    "in_base_layout", [lambda name: name.removeprefix("model."), lambda name: f"model.{name}" if name == HEAD else name]
)
def test_older_layouts_are_read_and_todays_is_written(tmp_path, in_base_layout):
    stored = folders.tensors()
    output = round_trip(write_folder(tmp_path / "source", {in_base_layout(name): tensor for name, tensor in stored.items()}))
    assert_same_bits(read_folder(output), stored)


def test_tied_head_stored_as_a_copy_is_written_as_a_copy(tmp_path):
    stored = folders.tensors(tied=True)
    stored[HEAD] = stored[EMBEDDING].clone()
    assert_same_bits(read_folder(round_trip(write_folder(tmp_path / "source", stored), tied=True)), stored)


def test_tied_head_may_stand_for_the_embedding(tmp_path):
    stored = folders.tensors(tied=True)
    moved = {HEAD if name == EMBEDDING else name: tensor for name, tensor in stored.items()}
    assert_same_bits(read_folder(round_trip(write_folder(tmp_path / "source", moved), tied=True)), stored)


def test_tied_head_with_other_values_is_refused(tmp_path):
    stored = folders.tensors(tied=True)
    stored[HEAD] = stored[EMBEDDING] + 1
    with pytest.raises(WeightsError, match=r"lm_head.weight against .*embed_tokens.weight \(set tie_word_embeddings to false"):
        load(write_folder(tmp_path / "source", stored), tied=True)


def test_untied_head_must_be_stored(tmp_path):
    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight"):
        load(write_folder(tmp_path / "source", folders.tensors(tied=True)), tied=False)


def test_everything_that_does_not_fit_is_listed_and_nothing_is_loaded(tmp_path):
    stored = folders.tensors()
    del stored["model.language_model.norm.weight"]
    stored["model.language_model.layers.2.mlp.up_proj.weight"] = torch.zeros(2)
    stored[EMBEDDING] = stored[EMBEDDING][:198].clone()
    model = folders.model()
    with pytest.raises(WeightsError) as error:
        load_hf_folder(model, write_folder(tmp_path / "source", stored), qwen3_vl_name_table(folders.config()))
    text = str(error.value)
    assert "1 missing: model.language_model.norm.weight" in text
    assert "1 unexpected: model.language_model.layers.2.mlp.up_proj.weight" in text
    assert f"{EMBEDDING} is [198, 8], the model needs [199, 8]" in text
    assert all(parameter.isnan().all() for parameter in model.parameters())


def test_two_layouts_of_one_tensor_are_refused(tmp_path):
    stored = folders.tensors()
    stored["visual.pos_embed.weight"] = stored["model.visual.pos_embed.weight"].clone()
    with pytest.raises(WeightsError, match="are the same tensor under two names"):
        load(write_folder(tmp_path / "source", stored))


class _Sentinel:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def test_case_45_pickles_are_refused_and_not_opened(tmp_path):
    folder = write_folder(tmp_path / "source", folders.tensors())
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(_Sentinel(tmp_path / "ran")))
    with pytest.raises(WeightsError, match=r"it has pytorch_model.bin, but pickles run code"):
        load(folder)
    assert not (tmp_path / "ran").exists()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(WeightsError, match="absent is no folder"):
        load(tmp_path / "absent")


def test_a_shard_cut_short_is_named(tmp_path):
    folder = write_folder(tmp_path / "source", folders.tensors(), num_shards=2)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(WeightsError, match=r"model-00002-of-00002.safetensors is damaged or cut short"):
        load(folder)


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    folder = write_folder(tmp_path / "source", folders.tensors(), num_shards=2)
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    whole["weight_map"]["phantom"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(whole))
    with pytest.raises(WeightsError, match=r"lists tensors that the files do not hold: phantom"):
        load(folder)
    whole["weight_map"]["phantom"] = "../elsewhere.safetensors"
    index.write_text(json.dumps(whole))
    with pytest.raises(WeightsError, match=r"not in the folder: \.\./elsewhere"):
        load(folder)
    index.write_text("{")
    with pytest.raises(WeightsError, match="has no weight_map"):
        load(folder)


def test_a_quantised_checkpoint_is_refused(tmp_path):
    stored = folders.tensors()
    stored[HEAD] = stored[HEAD].to(torch.float8_e4m3fn)
    with pytest.raises(WeightsError, match=r"lm_head.weight is stored as F8_E4M3"):
        load(write_folder(tmp_path / "source", stored))


def test_tensor_parallel_ranks_read_their_own_part(tmp_path):
    stored = folders.tensors()
    folder = write_folder(tmp_path / "source", stored)
    whole = load(folder)
    table = qwen3_vl_name_table(folders.config())
    name = "language_model.decoder.layers.1.mlp.linear_fc1.weight"
    for rank in (0, 1):
        part = folders.model()
        rules = table.pair(list(part.state_dict()))
        for target, parameter in part.named_parameters():
            parameter.data = rules[target].shard(parameter.data, rank, 2).clone()
        load_hf_folder(part, folder, table, TensorPlace(rank, 2))
        gate, up = whole.get_parameter(name).chunk(2)
        assert torch.equal(part.get_parameter(name), torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]))


def test_a_wrapped_model_is_looked_through(tmp_path):
    folder = write_folder(tmp_path / "source", folders.tensors())
    wrapper = nn.Module()
    wrapper.module = folders.model()
    load_hf_folder(wrapper, folder, qwen3_vl_name_table(folders.config()))
    assert not any(parameter.isnan().any() for parameter in wrapper.parameters())


def test_without_source_weights_types_are_those_of_the_configuration(tmp_path):
    """`init_from_config`: the folder describes the model and holds no weights."""
    folder = write_folder(tmp_path / "source", folders.tensors())
    model = load(folder)
    (folder / "model.safetensors").unlink()
    export_hf_folder(model, folder, tmp_path / "output", qwen3_vl_name_table(folders.config()))
    assert_same_bits(read_folder(tmp_path / "output"), {name: tensor.bfloat16() for name, tensor in folders.tensors().items()})


def test_an_earlier_export_is_replaced_and_nothing_else_is(tmp_path):
    folder = write_folder(tmp_path / "source", folders.tensors())
    table = qwen3_vl_name_table(folders.config())
    model = load(folder)
    output = tmp_path / "output"
    shutil.copytree(folder, output)
    (output / "stale.safetensors").write_bytes(b"")
    export_hf_folder(model, folder, output, table)
    assert not (output / "stale.safetensors").exists()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="holds files that are no model"):
        export_hf_folder(model, folder, tmp_path / "home", table)
    with pytest.raises(ConfigError, match="the folder that the weights came from"):
        export_hf_folder(model, folder, folder, table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "output", "source"]


def test_export_of_a_model_that_was_read_from_elsewhere_is_refused(tmp_path):
    folder = write_folder(tmp_path / "source", folders.tensors())
    model = load(folder)
    stored = folders.tensors()
    del stored["model.visual.pos_embed.weight"]
    other = write_folder(tmp_path / "other", stored)
    with pytest.raises(WeightsError, match=r"only one of them has model\.visual\.pos_embed\.weight"):
        export_hf_folder(model, other, tmp_path / "output", qwen3_vl_name_table(folders.config()))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "source"]
