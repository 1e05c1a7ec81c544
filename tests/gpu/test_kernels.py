"""Kernels that only run on a GPU, each against plain PyTorch or float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swiftcp.parallel.engine import transformer_engine_problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
needs_engine = pytest.mark.skipif(torch.cuda.is_available() and transformer_engine_problem() is not None, reason="needs Transformer Engine")

FAR = 100_000
"""A position at which phases in bfloat16 are off by many turns."""


def relative(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def head_inputs(num_tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden = torch.randn(num_tokens, 256, device="cuda", dtype=dtype, requires_grad=True)
    weight = (torch.randn(20_011, 256, device="cuda") * 0.2).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 20_000, (num_tokens,), device="cuda"), torch.rand(num_tokens, device="cuda")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize("chunk_tokens", [100, 1000])
def test_losses_and_gradients_of_the_head_are_those_of_float64(dtype: torch.dtype, tolerance: float, chunk_tokens: int) -> None:
    from swiftcp.models.head import token_losses

    hidden, weight, targets, upstream = head_inputs(300, dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    plain = F.cross_entropy((exact[0] @ exact[1].t())[:, :20_000], targets, reduction="none")
    expected = torch.autograd.grad((plain * upstream).sum(), exact)
    losses = token_losses(hidden, weight, targets, vocab_size=20_000, chunk_tokens=chunk_tokens)
    got = torch.autograd.grad((losses * upstream).sum(), (hidden, weight))
    assert losses.dtype == torch.float32 and relative(losses, plain) < tolerance
    assert [gradient.dtype for gradient in got] == [dtype, dtype]
    assert max(relative(ours, theirs) for ours, theirs in zip(got, expected, strict=True)) < tolerance
    assert got[1][20_000:].abs().max() == 0, "padding rows of the vocabulary take no part"


def test_the_head_without_a_label_gives_zero_gradients() -> None:
    from swiftcp.models.head import token_losses

    hidden, weight, *_ = head_inputs(5, torch.bfloat16)
    token_losses(hidden[:0], weight, torch.empty(0, dtype=torch.int64, device="cuda"), vocab_size=20_000).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    assert not hidden.grad.any() and not weight.grad.any()


def rotated_in_float64(heads_SBHD: Tensor, phases_SB1D: Tensor) -> Tensor:
    heads = heads_SBHD.double()
    first, second = heads.chunk(2, dim=-1)
    return heads * phases_SB1D.cos() + torch.cat((-second, first), dim=-1) * phases_SB1D.sin()


@needs_engine
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-3), (torch.bfloat16, 6e-3)])
def test_fused_rotary_at_far_positions_is_that_of_float64(dtype: torch.dtype, tolerance: float) -> None:
    """Each row of a padded batch has positions of its own."""
    from swiftcp.models.rotary import MultimodalRotary
    from swiftcp.parallel.layer_specs import apply_rotary_fused

    torch.manual_seed(0)
    positions = torch.randint(FAR - 500, FAR, (3, 2, 64), device="cuda")
    rotary = MultimodalRotary(128, 5e6, (24, 20, 20))
    frequencies = 1 / 5e6 ** (torch.arange(0, 128, 2, dtype=torch.float64, device="cuda") / 128)
    exact = positions.permute(2, 1, 0).double()[..., rotary.axis_of_frequency.cuda()] * frequencies
    exact = torch.cat((exact, exact), dim=-1).unsqueeze(2)
    heads = torch.randn(64, 2, 4, 128, device="cuda", dtype=dtype, requires_grad=True)
    rotated = apply_rotary_fused(heads, rotary(positions))
    assert rotated.dtype == dtype and relative(rotated, rotated_in_float64(heads, exact)) < tolerance
    upstream = torch.randn_like(rotated)
    (gradient,) = torch.autograd.grad(rotated, heads, upstream)
    assert relative(gradient, rotated_in_float64(upstream, -exact)) < tolerance


@pytest.mark.parametrize("backend", ["torch", pytest.param("te", marks=needs_engine)])
def test_phases_of_a_bfloat16_model_are_float32(tiny_qwen3_vl: Path, backend: Any) -> None:
    """Decoder and tower, at positions where bfloat16 would be lost."""
    from tests.gpu.harness import load_ours

    _, _, source, (model,) = load_ours(tiny_qwen3_vl, backend, torch.bfloat16)
    hf_config = source.hf_config
    text, vision = hf_config.text_config, hf_config.vision_config
    found = model.rotary(torch.full((3, 1, 1), FAR, device="cuda"))
    exponents = torch.arange(0, text.head_dim, 2, dtype=torch.float64, device="cuda") / text.head_dim
    expected = FAR / text.rope_parameters["rope_theta"] ** exponents
    assert found.dtype == torch.float32
    assert (found[0, 0, 0, : text.head_dim // 2].double() - expected).abs().max() < 0.01
    found = model.visual._phases(torch.full((1, 2), FAR, device="cuda"))
    half = vision.hidden_size // vision.num_heads // 2
    expected = FAR / 10_000 ** (torch.arange(0, half, 2, dtype=torch.float64, device="cuda") / half)
    assert found.dtype == torch.float32
    assert (found[0, 0, 0, : half // 2].double() - expected).abs().max() < 0.01


@needs_engine
@pytest.mark.parametrize("head_dim", [64, 72])
def test_fused_attention_inside_frames_is_that_of_float32(head_dim: int) -> None:
    from swiftcp.models.tower_layers import FrameLayout, frame_attention, fused_frame_attention

    torch.manual_seed(0)
    sizes = (1024, 256, 256, 48)
    frames = FrameLayout.of(sizes).map(Tensor.cuda)
    scale = head_dim**-0.5
    heads = [torch.randn(sum(sizes), 16, head_dim, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    exact = [values.detach().float().requires_grad_() for values in heads]
    expected = frame_attention(*exact, frames, scale)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, exact, upstream)
    for attend in (fused_frame_attention(16, head_dim, scale), frame_attention):
        output = attend(*heads, frames, scale)
        got = torch.autograd.grad(output, heads, upstream.bfloat16())
        assert relative(output, expected) < 5e-3
        assert max(relative(ours, theirs) for ours, theirs in zip(got, wanted, strict=True)) < 1e-2


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
