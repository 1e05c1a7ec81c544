"""The router's auxiliary losses on literal numbers, in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from swiftcp.parallel.moe import auxiliary_losses


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def losses(logits: list[list[float]], chosen: list[list[int]], real: list[bool]) -> tuple[float, float]:
    balance, z = auxiliary_losses(torch.tensor(logits), torch.tensor(chosen, dtype=torch.bool), torch.tensor(real), dist.group.WORLD)
    return balance.item(), z.item()


def test_even_use_is_one_and_a_single_expert_is_their_number():
    even = losses([[0.0, 0.0], [0.0, 0.0]], [[1, 0], [0, 1]], [True, True])
    assert even == pytest.approx((1.0, torch.tensor(2.0).log().square().item()))
    balance, _ = losses([[50.0, 0.0, 0.0, 0.0]] * 3, [[1, 0, 0, 0]] * 3, [True] * 3)
    assert balance == pytest.approx(4.0)


def test_padding_takes_no_part():
    tokens = [[1.0, -2.0, 0.5], [0.3, 0.2, 4.0]], [[1, 0, 1], [0, 1, 1]]
    alone = losses(*tokens, [True, True])
    padded = losses([*tokens[0], [9.0, 9.0, -9.0]], [*tokens[1], [1, 1, 0]], [True, True, False])
    assert padded == pytest.approx(alone)


def test_a_micro_batch_of_padding_alone_has_no_loss():
    assert losses([[9.0, -9.0]], [[1, 0]], [False]) == (0.0, 0.0)
