"""Micro-batches on their way to a GPU: cut and put into page-locked memory by a thread, while the GPU works on the one before."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from swiftcp.data.batch import Batch
from swiftcp.models.inputs import ModelInputs, make_inputs, plan_inputs
from swiftcp.models.towers import Geometry
from swiftcp.parallel.mesh import Mesh


@dataclass(frozen=True)
class PlannedBatch:
    """A micro-batch and this rank's part of it, still on the host."""

    batch: Batch
    inputs: ModelInputs

    @property
    def rows(self) -> tuple[int, ...]:
        return self.batch.rows


def plan_ahead(batches: Iterator[Batch], mesh: Mesh, geometry: Geometry) -> Iterator[Batch | PlannedBatch]:
    """The same micro-batches, each planned before it is asked for. On a CPU, where nothing could overlap, they come as they are."""
    if mesh.device.type != "cuda":
        yield from batches
        return

    def plan() -> PlannedBatch | None:
        batch = next(batches, None)
        return None if batch is None else PlannedBatch(batch, plan_inputs(batch, mesh, geometry).pin())

    with ThreadPoolExecutor(1, "plan", initializer=torch.cuda.set_device, initargs=(mesh.device,)) as thread:
        coming = thread.submit(plan)
        while (planned := coming.result()) is not None:
            coming = thread.submit(plan)
            yield planned


def send(batch: Batch | PlannedBatch, mesh: Mesh, geometry: Geometry) -> tuple[Batch, ModelInputs]:
    """The micro-batch, and this rank's part of it on its device."""
    if isinstance(batch, PlannedBatch):
        return batch.batch, batch.inputs.to(mesh.device)
    return batch, make_inputs(batch, mesh, geometry)
