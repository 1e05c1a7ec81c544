"""Real shapes with random weights on one GPU: log-probabilities and gradients, ours and those of `transformers`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch import Tensor

from swiftcp.data.batch import Batch, Sample, collate_pack, collate_rows
from swiftcp.launch import free_port
from swiftcp.models.inputs import ModelInputs, make_inputs
from swiftcp.models.shapes import shape_file
from swiftcp.trainers.logprobs import sample_starts
from tests.samples import make_sample

DEVICE = torch.device("cuda", 0)


def write_random_folder(shape: str, folder: Path, *, num_layers: int | None = None, seed: int = 0) -> Path:
    """A checkpoint of a public shape with random bfloat16 weights, scaled so that every part of the input moves the output, and
    cool enough for bfloat16: the logits' standard deviation is about 2.

    Args:
        num_layers: decoder layers, where fewer than the shape's.
    """
    import transformers
    from transformers import AutoConfig

    folder.mkdir(parents=True)
    config = json.loads(shape_file(shape).read_text())
    if num_layers is not None:
        config["text_config"]["num_hidden_layers"] = num_layers
    (folder / "config.json").write_text(json.dumps(config))
    hf_config = AutoConfig.from_pretrained(folder)
    torch.manual_seed(seed)
    with torch.device(DEVICE):
        model = getattr(transformers, config["architectures"][0])._from_config(hf_config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(0.05 * torch.randn_like(parameter))
            else:
                parameter.data.normal_(0, 0.8 / parameter[0].numel() ** 0.5)
    model.get_input_embeddings().weight.data.normal_(0, 0.05)
    model.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()
    return folder


def remove(folder: Path) -> None:
    shutil.rmtree(folder)


@dataclass(frozen=True)
class Outcome:
    logprobs: Tensor
    """[sum of L - 1] of all rows, one after the other, float32 on the host."""
    gradients: dict[str, Tensor]
    """By the checkpoint's names, on the GPU."""


def samples_of(folder: Path, mixes: Sequence[str]) -> list[Sample]:
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(folder)
    return [make_sample(mix, hf_config, row=row, labelled=0.5) for row, mix in enumerate(mixes)]


def _rounded(sample: Sample) -> Sample:
    """Patches that bfloat16 holds exactly, so that the inputs of all runs are the same."""
    if sample.visual is None:
        return sample
    return dataclasses.replace(sample, visual=dataclasses.replace(sample.visual, patches_PD=sample.visual.patches_PD.bfloat16().float()))


def run_transformers(folder: Path, mixes: Sequence[str], dtype: torch.dtype) -> Outcome:
    """One row at a time."""
    from swiftcp.models.registry import family_of
    from swiftcp.trainers.oracle import load_oracle, oracle_logprobs

    model = load_oracle(folder, family_of("qwen3_vl"), dtype=dtype, device=DEVICE)
    logprobs = []
    for sample in samples_of(folder, mixes):
        row = oracle_logprobs(model, _rounded(sample))
        logprobs.append(row.detach().cpu())
        (-(row * sample.weights_L[1:].to(DEVICE)).sum()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    del model
    torch.cuda.empty_cache()
    return Outcome(torch.cat(logprobs), gradients)


def build_ours(folder: Path, backend: Any, dtype: torch.dtype, cp_size: int = 1) -> tuple[Any, Any, Any, Any]:
    """(model with the folder's weights, mesh, family, configuration) on this rank's GPU."""
    from megatron.core import tensor_parallel
    from transformers import AutoConfig

    from swiftcp.checkpoint.hf_reader import load_hf_folder
    from swiftcp.models.build import build_model, transformer_config
    from swiftcp.models.registry import family_of
    from swiftcp.parallel.mesh import build_mesh, select_device, start_process_group

    device = select_device("cuda")
    start_process_group(device)
    mesh = build_mesh(device, context_parallel_size=cp_size)
    tensor_parallel.model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    hf_config = AutoConfig.from_pretrained(folder)
    family = family_of(hf_config.model_type)
    config = transformer_config(family, hf_config, mesh, dtype=dtype, backend=backend, cp_comm_type="p2p")
    model = build_model(family, hf_config, config, mesh, backend=backend)
    load_hf_folder(model, folder, family.name_table(hf_config))
    return model, mesh, family, hf_config


def _collate(samples: Sequence[Sample], packing: bool) -> Batch:
    return (collate_pack if packing else collate_rows)(samples, pack_align=64, pad_token_id=0)


def run_ours(
    folder: Path,
    mixes: Sequence[str],
    backend: Any,
    dtype: torch.dtype = torch.bfloat16,
    *,
    packing: bool = True,
    backward: bool = True,
    cp_size: int = 1,
) -> Outcome:
    """All rows in one pack, or in one padded batch. Without `backward` there are no gradients; with CP each rank has its share of them."""
    model, mesh, family, hf_config = build_ours(folder, backend, dtype, cp_size)
    geometry = family.tower_geometry(hf_config)
    samples = [_rounded(sample) for sample in samples_of(folder, mixes)]
    every = [dataclasses.replace(s, labels_L=s.input_ids_L, weights_L=torch.ones(len(s))) for s in samples]
    batch = _collate(every, packing)
    inputs = make_inputs(batch, mesh, geometry)
    with torch.no_grad():
        losses = model.eval()(inputs)
    stream = torch.zeros(batch.input_ids_BS.numel(), device=mesh.device)
    stream[inputs.label_positions_N.to(mesh.device)] = -losses
    torch.distributed.all_reduce(stream, group=mesh.cp_group)
    stream = stream.cpu()
    logprobs = torch.cat([stream[s : s + n - 1] for s, n in zip(sample_starts(batch), batch.lengths, strict=False)])
    gradients = _gradients(model.train(), make_inputs(_collate(samples, packing), mesh, geometry), family.name_table(hf_config), backward)
    del model
    torch.cuda.empty_cache()
    return Outcome(logprobs, gradients)


def _gradients(model: Any, inputs: ModelInputs, table: Any, backward: bool) -> dict[str, Tensor]:
    """Of the weighted loss sum, by the checkpoint's names."""
    gradients: dict[str, Tensor] = {}
    if not backward:
        return gradients
    (model(inputs) * inputs.weights_N).sum().backward()
    by_target = {name: parameter.grad for name, parameter in model.named_parameters()}
    for target, rule in table.pair(list(by_target)).items():
        gradients.update(zip(rule.sources, rule.separate(by_target[target]), strict=True))
    return gradients


def _run_rank(rank: int, num_ranks: int, port: int, folder: Path, mixes: Sequence[str], backend: Any, fault: str | None) -> None:
    from tests.distributed.parity_faults import FAULTS

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        outcome = run_ours(folder, mixes, backend, backward=False, cp_size=num_ranks)
    if rank == 0:
        torch.save(outcome.logprobs, folder / "logprobs.pt")
    torch.distributed.destroy_process_group()


def run_on_ranks(folder: Path, mixes: Sequence[str], backend: Any, fault: str | None, num_ranks: int = 2) -> Outcome:
    """Log-probabilities under context parallelism, one GPU a rank, with a fault of `parity_faults` or without."""
    torch.multiprocessing.spawn(_run_rank, (num_ranks, free_port(), folder, mixes, backend, fault), nprocs=num_ranks)
    return Outcome(torch.load(folder / "logprobs.pt"), {})


def gradient_agreement(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """(cosine, ratio of norms) of each tensor."""
    agreement = {}
    for name, theirs in expected.items():
        ours, theirs = got[name].double().flatten(), theirs.double().flatten()
        norms = ours.norm(), theirs.norm()
        agreement[name] = ((ours @ theirs / (norms[0] * norms[1])).item(), (norms[0] / norms[1]).item())
    return agreement
