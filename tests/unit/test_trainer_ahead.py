"""Micro-batches planned ahead are the same as those planned when they are asked for."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from swiftcp.data.batch import Batch, Sample, collate_pack
from swiftcp.models.inputs import ModelInputs
from swiftcp.trainers.ahead import PlannedBatch, plan_ahead, send


def mesh(device: str) -> Any:
    of_one_rank = dict(cp_size=1, cp_rank=0, cp_partition_mode="zigzag", sequence_parallel=False, is_first_stage=True)
    return SimpleNamespace(device=torch.device(device), **of_one_rank)


def pack(row: int) -> Batch:
    ids = torch.arange(5) + row
    sample = Sample(row, ids, ids, torch.ones(5), torch.arange(5).expand(3, -1))
    return collate_pack([sample], pack_align=8, pad_token_id=0)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A mesh that says it is on a GPU."""
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(ModelInputs, "pin", lambda inputs: inputs)
    return mesh("cuda:0")


def test_on_a_cpu_they_come_as_they_are() -> None:
    batches = [pack(row) for row in range(3)]
    assert list(plan_ahead(iter(batches), mesh("cpu"), {})) == batches


def test_planned_inputs_equal_those_made_at_once(cuda: Any) -> None:
    batches = [pack(row) for row in range(3)]
    planned = list(plan_ahead(iter(batches), cuda, {}))
    assert [one.rows for one in planned] == [(0,), (1,), (2,)]
    for one, batch in zip(planned, batches, strict=True):
        assert isinstance(one, PlannedBatch)
        (_, sent), (_, expected) = (send(it, mesh("cpu"), {}) for it in (one, batch))
        tensors = {name: value for name, value in vars(expected).items() if isinstance(value, Tensor)}
        assert all(torch.equal(getattr(sent, name), value) for name, value in tensors.items())
        assert sent.cu_seqlens is sent.packed.cu_seqlens_q
        assert (sent.packed.host_ends, sent.packed.max_seqlen_q) == ((0, 8), 8)


def test_one_is_planned_while_the_one_before_is_used(cuda: Any) -> None:
    started = threading.Event()

    def batches() -> Any:
        yield pack(0)
        started.set()
        yield pack(1)

    planned = plan_ahead(batches(), cuda, {})
    next(planned)
    assert started.wait(10)


def test_an_error_of_the_data_comes_out_where_it_is_asked_for(cuda: Any) -> None:
    def batches() -> Any:
        yield pack(0)
        raise ValueError("row 1 is bad")

    planned = plan_ahead(batches(), cuda, {})
    next(planned)
    with pytest.raises(ValueError, match="row 1 is bad"):
        next(planned)
