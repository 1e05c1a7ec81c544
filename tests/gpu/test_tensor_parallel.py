"""Two GPUs: tensor and sequence parallelism against one GPU, on both backends; one GPU: the loss kernels on a part of the vocabulary."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing

from swiftcp.launch import free_port
from swiftcp.parallel.engine import transformer_engine_problem
from tests.distributed.layout_harness import LAYOUTS, Result, differences, measure
from tests.gpu.harness import gradient_agreement

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
needs_engine = pytest.mark.skipif(torch.cuda.is_available() and transformer_engine_problem() is not None, reason="needs Transformer Engine")


def _measure_rank(rank: int, num_ranks: int, port: int, folder: Path, keys: dict[str, Any]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    result = measure(folder, keys)
    if rank == 0:
        torch.save(result, folder / "result.pt")
    torch.distributed.destroy_process_group()


def on_gpus(folder: Path, keys: dict[str, Any], num_ranks: int) -> Result:
    torch.multiprocessing.spawn(_measure_rank, (num_ranks, free_port(), folder, {"device": "cuda", **keys}), nprocs=num_ranks)
    return torch.load(folder / "result.pt", map_location="cpu", weights_only=False)


@needs_two
@pytest.mark.parametrize("name", ["TP2", "TP2+SP"])
def test_float32_gives_what_one_gpu_gives(tiny_qwen3_vl: Path, name: str) -> None:
    keys = {"torch_dtype": "float32", "attention_backend": "torch"}
    one, two = on_gpus(tiny_qwen3_vl, keys, 1), on_gpus(tiny_qwen3_vl, LAYOUTS[name].keys | keys, 2)
    for got, expected in ((two.packed, one.packed), (two.padded, one.padded)):
        found = differences(got, expected)
        assert max(found.loss, found.grad_norm, found.gradient, found.logprob) < 5e-5, found


@needs_two
@needs_engine
@pytest.mark.parametrize("name", ["TP2", "TP2+SP"])
def test_bfloat16_on_transformer_engine_gives_what_one_gpu_gives(tiny_qwen3_vl: Path, name: str) -> None:
    keys = {"torch_dtype": "bfloat16", "attention_backend": "te", "use_distributed_optimizer": True}
    one, two = on_gpus(tiny_qwen3_vl, keys, 1), on_gpus(tiny_qwen3_vl, LAYOUTS[name].keys | keys, 2)
    for got, expected in ((two.packed, one.packed), (two.padded, one.padded)):
        assert got.loss == pytest.approx(expected.loss, rel=2e-3) and got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
        for parameter, (cosine, ratio) in gradient_agreement(got.gradients, expected.gradients).items():
            assert cosine > 0.99 and 0.95 < ratio < 1.05, (parameter, cosine, ratio)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_of_a_part_of_the_vocabulary(dtype: torch.dtype) -> None:
    """Targets before, in and behind the part; the float32 formula on the host is the reference."""
    from swiftcp.models.head import _logits_to_gradients, _row_statistics

    torch.manual_seed(0)
    logits = torch.randn(64, 10_000).to(dtype)
    targets = torch.randint(-10_000, 20_000, (64,))
    log_sums, of_targets = _row_statistics(logits, targets)
    outside = (targets < 0) | (targets >= 10_000)
    assert outside.any() and (of_targets[outside] == 0).all()
    on_gpu = _row_statistics(logits.cuda(), targets.cuda())
    assert (on_gpu[0].cpu() - log_sums).abs().max() < 1e-4 and torch.equal(on_gpu[1].cpu(), of_targets)
    whole, upstream = log_sums + 1.0, torch.rand(64)
    expected = _logits_to_gradients(logits, targets, whole, upstream)
    got = _logits_to_gradients(logits.cuda(), targets.cuda(), whole.cuda(), upstream.cuda())
    assert (got.cpu().float() - expected.float()).abs().max() < (1e-6 if dtype == torch.float32 else 1e-2)
