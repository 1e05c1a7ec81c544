"""Rotary phases against transformers and float64; the head against a plain cross-entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from swiftcp.models.head import token_losses
from swiftcp.models.rotary import MultimodalRotary

SECTIONS = (6, 5, 5)


def test_cosines_and_sines_equal_transformers() -> None:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(SECTIONS), "mrope_interleaved": True}
    theirs = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=32, rope_parameters=rope))
    positions = torch.randint(0, 5000, (3, 2, 7), generator=torch.Generator().manual_seed(0))
    cos, sin = theirs(torch.zeros(1), positions.clone())
    ours = MultimodalRotary(32, 5e6, SECTIONS)(positions)
    assert ours.shape == (7, 2, 1, 32)
    assert torch.equal(ours[:, :, 0].cos(), cos.transpose(0, 1))
    assert torch.equal(ours[:, :, 0].sin(), sin.transpose(0, 1))


def test_phases_of_far_positions_survive_a_cast_of_the_model() -> None:
    rotary = MultimodalRotary(128, 5e6, (24, 20, 20)).bfloat16()
    positions = torch.full((3, 1, 1), 100_000)
    exponents = torch.arange(0, 128, 2, dtype=torch.float64) / 128
    expected = (100_000 / 5e6**exponents).cos()
    assert (rotary(positions)[0, 0, 0, :64].double().cos() - expected).abs().max() < 0.01


def test_case_42_chunks_of_the_head_give_the_plain_losses_and_gradients() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(11, 16, generator=generator, requires_grad=True)
    weight = torch.randn(40, 16, generator=generator, requires_grad=True)
    targets = torch.randint(0, 37, (11,), generator=generator)
    upstream = torch.rand(11, generator=generator)
    plain = F.cross_entropy((hidden @ weight.t())[:, :37], targets, reduction="none")
    expected = torch.autograd.grad((plain * upstream).sum(), (hidden, weight))
    for chunk_tokens in (1, 4, 100):
        losses = token_losses(hidden, weight, targets, vocab_size=37, chunk_tokens=chunk_tokens)
        got = torch.autograd.grad((losses * upstream).sum(), (hidden, weight))
        assert (losses - plain).abs().max() < 1e-5
        for ours, theirs in zip(got, expected, strict=True):
            assert (ours - theirs).abs().max() < 1e-5
    assert expected[1][37:].abs().max() == 0, "padding rows of the vocabulary take no part"


def test_no_label_gives_no_loss_but_zero_gradients() -> None:
    hidden = torch.randn(5, 16, requires_grad=True)
    weight = torch.randn(40, 16, requires_grad=True)
    losses = token_losses(hidden[:0], weight, torch.empty(0, dtype=torch.int64), vocab_size=40)
    losses.sum().backward()
    assert losses.shape == (0,)
    assert torch.equal(hidden.grad, torch.zeros(5, 16)) and torch.equal(weight.grad, torch.zeros(40, 16))
