"""The gated delta rule in chunks against a loop over tokens; the convolution against a sum; what layouts must divide."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from swiftcp.checkpoint.name_table import GatedQueryKeyValue, Sections
from swiftcp.parallel.delta_rule import causal_convolution, gated_delta_rule


def token_by_token(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """One sequence and one head: [L, K], [L, K], [L, V], [L], [L] -> [L, V]."""
    state = torch.zeros(key.size(1), value.size(1), dtype=value.dtype)
    outputs = []
    for q, k, v, g, b in zip(F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, decay, beta, strict=True):
        state = state * g.exp()
        state = state + torch.outer(k, b * (v - k @ state))
        outputs.append(q @ state / q.numel() ** 0.5)
    return torch.stack(outputs)


@pytest.mark.parametrize("length", [1, 7, 64, 150])
def test_chunks_give_outputs_and_gradients_of_the_recurrence(length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, length, 3, 16), (2, length, 3, 16), (2, length, 3, 8), (2, length, 3), (2, length, 3)]
    query, key, value, decay, beta = (torch.randn(shape, generator=generator) for shape in shapes)
    inputs = [values.requires_grad_() for values in (query, key, value, -F.softplus(decay), beta.sigmoid())]
    found = gated_delta_rule(*inputs)
    rows = [[token_by_token(*(values[n, :, h].double() for values in inputs)) for h in range(3)] for n in range(2)]
    expected = torch.stack([torch.stack(row, dim=1) for row in rows])
    assert (found - expected).abs().max() < 1e-6
    upstream = torch.randn(found.shape, generator=generator)
    gradients, wanted = (torch.autograd.grad((values * upstream).sum(), inputs) for values in (found, expected))
    for ours, theirs in zip(gradients, wanted, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * max(theirs.abs().max().item(), 1e-2)


def test_a_channel_is_filtered_over_its_own_past() -> None:
    values, weight = torch.randn(1, 6, 2), torch.randn(2, 1, 4)
    for token in range(6):
        for channel in range(2):
            past = sum(weight[channel, 0, 3 - back] * values[0, token - back, channel] for back in range(min(token, 3) + 1))
            assert torch.allclose(causal_convolution(values, weight)[0, token, channel], F.silu(torch.as_tensor(past)), atol=1e-6)


def test_sections_are_cut_one_by_one() -> None:
    rule = Sections(("qk", "qk", "v"), ("target",), parallel_dim=0, sizes=(4, 2, 6))
    qk, v = torch.arange(6.0)[:, None], torch.arange(10.0, 16.0)[:, None]
    whole = rule.join([qk[:4], qk[4:], v], (12, 1))
    shards = [rule.shard(whole, rank, 2) for rank in range(2)]
    assert shards[1].flatten().tolist() == [2, 3, 5, 13, 14, 15]
    assert torch.equal(rule.unshard(shards), whole)
    assert {name: part.flatten().tolist() for name, part in rule.by_source(whole).items()} == {"qk": [*range(6)], "v": [*range(10, 16)]}
    assert rule.source_slices((6, 1), 1, 2) == [(slice(2, 4),), (slice(5, 6),), (slice(3, 6),)]
    assert rule.source_shapes((12, 1)) == [(6, 1), (6, 1), (6, 1)]
    assert torch.equal(rule.local((6, 1), 1, 2).join([qk[2:4], qk[5:], v[3:]], (6, 1)), shards[1])


def test_gates_stand_behind_the_queries_of_their_group() -> None:
    rule = GatedQueryKeyValue(("q", "k", "v"), ("target",), parallel_dim=0, num_groups=2, head_dim=1)
    queries = torch.tensor([1, -1, 2, -2, 3, -3, 4, -4.0])[:, None]  # query, gate of each head
    keys, values = torch.tensor([5.0, 6.0])[:, None], torch.tensor([7.0, 8.0])[:, None]
    whole = rule.join([queries, keys, values], (12, 1))
    assert whole.flatten().tolist() == [1, 2, -1, -2, 5, 7, 3, 4, -3, -4, 6, 8]
    assert all(torch.equal(a, b) for a, b in zip(rule.separate(whole), (queries, keys, values), strict=True))
