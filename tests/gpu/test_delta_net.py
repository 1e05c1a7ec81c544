"""flash-linear-attention's kernel for the gated delta rule against plain PyTorch, on packed sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swiftcp.parallel.delta_rule import fla_kernel, gated_delta_rule
from tests.gpu.test_kernels import relative

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
TOLERANCE = 0.01
"""Of bfloat16, relative to the norm of what is compared."""


def test_the_kernel_keeps_sequences_apart() -> None:
    kernel = fla_kernel()
    if kernel is None:
        pytest.skip("flash-linear-attention cannot be used here; the run says why")
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 512, 16, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    decay = (-F.softplus(torch.randn(1, 512, 16, device="cuda"))).requires_grad_()
    beta = torch.rand(1, 512, 16, device="cuda", dtype=torch.bfloat16).requires_grad_()
    inputs: list[Tensor] = [query, key, value, decay, beta]
    found, _ = kernel(*inputs, cu_seqlens=torch.tensor([0, 100, 512], dtype=torch.int32, device="cuda"), use_qk_l2norm_in_kernel=True)
    expected = torch.cat([gated_delta_rule(*(values[:, part] for values in inputs)) for part in (slice(0, 100), slice(100, 512))], dim=1)
    assert relative(found, expected) < TOLERANCE
    upstream = torch.randn_like(expected)
    gradients = (torch.autograd.grad((output * upstream).sum(), inputs) for output in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        assert relative(ours, theirs) < TOLERANCE
