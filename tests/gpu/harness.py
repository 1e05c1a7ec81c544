"""Real shapes with random weights on one GPU: log-probabilities and gradients, ours and those of `transformers`."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftcp.data.batch import Batch, Sample, collate_pack, collate_rows
from swiftcp.models.shapes import shape_file
from swiftcp.trainers.logprobs import sample_starts
from tests.distributed.layout_harness import gather_reduced_gradients
from tests.distributed.model_harness import as_stored
from tests.distributed.training_harness import train_config
from tests.samples import make_sample

DEVICE = torch.device("cuda", 0)
MIXES = ("long_text", "document", "text", "long_video", "three_images", "image_and_video")
ERROR_RATIO = 1.5
"""Our mean error of log-probabilities against float32, over that of `transformers` in bfloat16."""
CONTROL_FACTOR = 10
"""A fault must move the figure by so many tolerances."""
LEAST_COSINE, NORM_TOLERANCE = 0.999, 0.01
"""Of each tensor's gradient."""


def write_random_folder(
    shape: str, folder: Path, *, num_layers: int | None = None, seed: int = 0, changes: dict[str, Any] | None = None
) -> Path:
    """A checkpoint of a public shape with random bfloat16 weights, scaled so that every part of the input moves the output, and
    cool enough for bfloat16: the logits' standard deviation is about 2.

    Args:
        num_layers: decoder layers, where fewer than the shape's.
        changes: other values of config.json.
    """
    import transformers
    from transformers import AutoConfig

    folder.mkdir(parents=True)
    config = json.loads(shape_file(shape).read_text()) | (changes or {})
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
                each = parameter[0] if parameter.dim() == 3 else parameter  # all experts of a layer are one tensor
                parameter.data.normal_(0, 0.8 / each[0].numel() ** 0.5)
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
    """Of the weighted sum of the labelled tokens' losses, by the checkpoint's names, on the GPU; of this rank's pipeline stage alone."""
    loss: float
    """Mean over the labelled tokens."""
    grad_norm: float
    """Of the mean's whole gradient; 0 without a backward pass."""


def samples_of(folder: Path, mixes: Sequence[str]) -> list[Sample]:
    from transformers import AutoConfig

    hf_config = AutoConfig.from_pretrained(folder)
    return [make_sample(mix, hf_config, row=row, labelled=0.5) for row, mix in enumerate(mixes)]


def _rounded(sample: Sample) -> Sample:
    """Patches and frames of sound that bfloat16 holds exactly, so that the inputs of all runs are the same."""
    visual, audio = sample.visual, sample.audio
    if visual is not None:
        visual = dataclasses.replace(visual, patches_PD=visual.patches_PD.bfloat16().float())
    if audio is not None:
        audio = dataclasses.replace(audio, features_FM=audio.features_FM.bfloat16().float())
    return dataclasses.replace(sample, visual=visual, audio=audio)


def run_transformers(folder: Path, mixes: Sequence[str], dtype: torch.dtype) -> Outcome:
    """One row at a time."""
    from transformers import AutoConfig

    from swiftcp.models.registry import family_of
    from swiftcp.trainers.oracle import load_oracle, oracle_logprobs

    hf_config = AutoConfig.from_pretrained(folder)
    model = load_oracle(folder, family_of(hf_config.model_type), dtype=dtype, device=DEVICE)
    logprobs, loss_sum, num_labels = [], 0.0, 0
    for sample in samples_of(folder, mixes):
        row = oracle_logprobs(model, _rounded(sample))
        logprobs.append(row.detach().float().cpu())
        weights = sample.weights_L[1:].to(DEVICE)
        loss = -(row * weights).sum()
        loss.backward()
        loss_sum, num_labels = loss_sum + loss.item(), num_labels + int((weights > 0).sum())
    gradients = as_stored({name: parameter.grad for name, parameter in model.named_parameters()}, hf_config)
    del model
    torch.cuda.empty_cache()
    norm = torch.stack([gradient.float().norm() for gradient in gradients.values()]).norm().item()
    return Outcome(torch.cat(logprobs), gradients, loss_sum / num_labels, norm / num_labels)


def bare_source(folder: Path) -> Any:
    """Of a folder without tokenizer and processor."""
    from transformers import AutoConfig

    from swiftcp.models.registry import family_of
    from swiftcp.trainers.setup import Source

    hf_config = AutoConfig.from_pretrained(folder)
    family = family_of(hf_config.model_type)
    return Source(folder, family, hf_config, None, family.tower_geometry(hf_config))


def load_ours(folder: Path, backend: Any, dtype: torch.dtype, **keys: Any) -> tuple[Any, Any, Any, list[Any]]:
    """(configuration, mesh, source, model chunks with the folder's weights) on this rank's GPU."""
    from swiftcp.trainers.setup import load_model, start_ranks

    fixed = {"device": "cuda", "torch_dtype": str(dtype).removeprefix("torch."), "attention_backend": backend}
    config = train_config(folder, **fixed, **keys)
    mesh, source = start_ranks(config), bare_source(folder)
    return config, mesh, source, load_model(config, source, mesh)


def _batches(samples: Sequence[Sample], config: Any, mesh: Any, num_packs: int) -> list[Batch]:
    """All of a global batch: the samples in turn in `num_packs` packs, or padded batches."""
    from swiftcp.trainers.datasets import batch_layout

    layout = batch_layout(config, mesh)
    collate = collate_pack if config.packing else collate_rows
    packs = [samples[number * len(samples) // num_packs : (number + 1) * len(samples) // num_packs] for number in range(num_packs)]
    return [collate(pack, pack_align=config.pack_align, pad_token_id=0, length_multiple=layout.length_multiple) for pack in packs]


def run_ours(
    folder: Path,
    mixes: Sequence[str],
    backend: Any,
    dtype: torch.dtype = torch.bfloat16,
    *,
    packing: bool = True,
    backward: bool = True,
    num_packs: int = 1,
    **keys: Any,
) -> Outcome:
    """On each rank of a layout, through the pieces of training itself. Without `backward` there are no gradients."""
    from swiftcp.trainers.logprobs import token_logprobs

    config, mesh, source, chunks = load_ours(folder, backend, dtype, packing=packing, **keys)
    samples = [_rounded(sample) for sample in samples_of(folder, mixes)]
    every = [dataclasses.replace(s, labels_L=s.input_ids_L, weights_L=torch.ones(len(s))) for s in samples]
    batches = _batches(every, config, mesh, num_packs)
    streams = token_logprobs([chunk.eval() for chunk in chunks], batches, source, mesh)
    logprobs = torch.cat(
        [
            stream[start : start + length - 1]
            for stream, batch in zip(streams, batches, strict=True)
            for start, length in zip(sample_starts(batch), batch.lengths, strict=False)
        ]
    )
    gradients, loss, norm = {}, 0.0, 0.0
    if backward:
        gradients, loss, norm = _train(chunks, _batches(samples, config, mesh, num_packs), config, mesh, source)
    del chunks
    torch.cuda.empty_cache()
    return Outcome(logprobs, gradients, loss, norm)


def _train(chunks: Sequence[Any], batches: Sequence[Batch], config: Any, mesh: Any, source: Any) -> tuple[dict[str, Tensor], float, float]:
    """Gradients of the loss's sum, by the checkpoint's names; the mean loss, and the norm of its gradient."""
    from swiftcp.checkpoint.together import whole_tensors
    from swiftcp.models.mm_gpt_model import named_parameters
    from swiftcp.trainers.optimizer import build_optimizer, wrap_model
    from swiftcp.trainers.step import Runner, run_micro_batches

    wrapped = wrap_model([chunk.train() for chunk in chunks], mesh, use_distributed_optimizer=bool(config.use_distributed_optimizer))
    optimizer = build_optimizer(wrapped, config, source.family)
    share = batches[mesh.dp_rank :: mesh.dp_size]
    totals = run_micro_batches(Runner(wrapped, mesh, source.geometry, chunks[0].vocab_size), iter(share), len(share))
    if config.use_distributed_optimizer:
        gather_reduced_gradients(wrapped, mesh.dp_cp_group)
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    own = {name: p.main_grad for chunk in chunks for name, p in named_parameters(chunk)}
    whole = whole_tensors(own, source.family.name_table(source.hf_config), mesh)
    return {name: gradient * totals.labelled_tokens for name, gradient in whole}, totals.loss, norm


@dataclass(frozen=True)
class Comparison:
    """Of a layout's run with gradients that lie in a file; the same on every rank."""

    logprobs: Tensor
    loss: float
    grad_norm: float
    agreement: dict[str, tuple[float, float]]
    """(cosine, ratio of norms) of each tensor's gradient."""


def compare_on_rank(
    folder: Path, mixes: Sequence[str], keys: dict[str, Any], fault: str | None, gradients: Path | None, num_packs: int
) -> Comparison:
    """On each rank of a pool: a layout in bfloat16 with Transformer Engine, with a fault of `parity_faults` or without."""
    from swiftcp.checkpoint.together import gather_all
    from tests.distributed.parity_faults import FAULTS

    with FAULTS[fault]() if fault else contextlib.nullcontext():
        outcome = run_ours(folder, mixes, "te", backward=gradients is not None, num_packs=num_packs, **keys)
    agreement: dict[str, tuple[float, float]] = {}
    if gradients is not None:
        expected = torch.load(gradients, mmap=True)
        own = {name: expected[name].to(gradient.device) for name, gradient in outcome.gradients.items()}
        for part in gather_all(gradient_agreement(outcome.gradients, own)):
            agreement |= part
    return Comparison(outcome.logprobs, outcome.loss, outcome.grad_norm, agreement)


def gradient_agreement(got: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """(cosine, ratio of norms) of each tensor."""
    agreement = {}
    for name, theirs in expected.items():
        ours, theirs = got[name].double().flatten(), theirs.double().flatten()
        norms = ours.norm(), theirs.norm()
        agreement[name] = ((ours @ theirs / (norms[0] * norms[1])).item(), (norms[0] / norms[1]).item())
    return agreement


def disagreeing(agreement: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """The gradients that are too far from those they were compared with, NaN included."""
    return {
        name: (cosine, norms)
        for name, (cosine, norms) in agreement.items()
        if not (cosine >= LEAST_COSINE and abs(norms - 1) <= NORM_TOLERANCE)
    }


def error(found: Outcome | Comparison, reference: Outcome, where: Tensor | None = None) -> float:
    """Mean over log-probabilities."""
    difference = (found.logprobs - reference.logprobs).abs()
    return (difference if where is None else difference[where]).mean().item()
