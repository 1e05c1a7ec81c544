"""Two GPUs: pipeline stages, of one chunk and of two, against one GPU, on both backends."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.layout_harness import EIGHT_LAYERS, LAYOUTS, differences
from tests.gpu.harness import gradient_agreement
from tests.gpu.test_tensor_parallel import needs_engine, needs_two, on_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
STAGES = {"PP2": LAYOUTS["PP2"], "PP2 of 2 chunks": EIGHT_LAYERS["PP2 of 2 chunks"]}


@needs_two
@pytest.mark.parametrize("name", STAGES)
def test_float32_gives_what_one_gpu_gives(eight_layers: Path, name: str) -> None:
    keys = {"torch_dtype": "float32", "attention_backend": "torch"}
    one, two = on_gpus(eight_layers, keys, 1), on_gpus(eight_layers, STAGES[name].keys | keys, 2)
    for got, expected in ((two.packed, one.packed), (two.padded, one.padded)):
        found = differences(got, expected)
        assert max(found.loss, found.grad_norm, found.gradient, found.logprob) < 5e-5, found


@needs_two
@needs_engine
@pytest.mark.parametrize("name", STAGES)
def test_bfloat16_on_transformer_engine_gives_what_one_gpu_gives(eight_layers: Path, name: str) -> None:
    keys = {"torch_dtype": "bfloat16", "attention_backend": "te", "use_distributed_optimizer": True}
    one, two = on_gpus(eight_layers, keys, 1), on_gpus(eight_layers, STAGES[name].keys | keys, 2)
    for got, expected in ((two.packed, one.packed), (two.padded, one.padded)):
        assert got.loss == pytest.approx(expected.loss, rel=2e-3) and got.grad_norm == pytest.approx(expected.grad_norm, rel=1e-2)
        for parameter, (cosine, ratio) in gradient_agreement(got.gradients, expected.gradients).items():
            assert cosine > 0.99 and 0.95 < ratio < 1.05, (parameter, cosine, ratio)
