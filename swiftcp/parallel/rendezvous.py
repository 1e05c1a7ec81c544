"""Where ranks find each other, and make sure that they are about to do the same, before there is a process group.

Nodes resolve their recipe each for itself. Where they come to different ends, or count ranks differently, collectives would hang.
Here each node says what it is about to do, and every rank compares.
"""

from __future__ import annotations

import datetime
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from swiftcp.config.environment import is_loopback
from swiftcp.errors import ConfigError, TrainingError

MEETING_MINUTES = 10.0
"""How long nodes wait for each other."""
LOOPBACK_MINUTES = 2.0
"""The same where the meeting point is the loopback interface: then all are on one machine, or they never meet."""

_SECONDS_TO_COMPARE = 5.0
"""How long the rank that holds the store keeps it for the others, once it knows that nodes disagree."""


@dataclass(frozen=True)
class Place:
    """This rank among all, as the launcher's variables say; every node has equally many ranks."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int

    @classmethod
    def from_environment(cls) -> Place:
        rank, world_size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
        local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        return cls(rank, world_size, local_rank, local_world_size, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))

    @property
    def node(self) -> int:
        return self.rank // self.local_world_size

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def minutes(self) -> float:
        return LOOPBACK_MINUTES if self.num_nodes > 1 and is_loopback(self.address) else MEETING_MINUTES

    def describe(self) -> str:
        return f"MASTER_ADDR={self.address}, MASTER_PORT={self.port}"


def _open_store(place: Place, minutes: float) -> dist.Store:
    """Rank 0 holds it, or torchrun's agent does.

    Raises:
        ConfigError: rank 0 cannot listen there.
        TrainingError: nobody listens there.
    """
    held_by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_master = place.rank == 0 and not held_by_agent
    try:
        store = dist.TCPStore(
            place.address, place.port, is_master=is_master, wait_for_workers=False, timeout=datetime.timedelta(minutes=minutes)
        )
    except RuntimeError as error:  # DistNetworkError, DistStoreError
        reason = str(error).partition("\n")[0]
        if is_master:
            raise ConfigError(f"rank 0 cannot listen at {place.describe()}: {reason}: set a free port, and this node's address") from None
        raise TrainingError(
            f"node {place.node} did not reach rank 0 within {minutes:g} minutes ({reason}): is node 0 started, and is {place.describe()} "
            "its address as seen from here?"
        ) from None
    return dist.PrefixStore(f"meeting/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Lines about what two nodes say differently."""
    absent = "(not set)"
    for key in sorted(one["terms"].keys() | other["terms"].keys()):
        here, there = (record["terms"].get(key, absent) for record in (one, other))
        if here != there:
            yield f"  {key}: {here} on node {one['node']} ({one['host']}), {there} on node {other['node']} ({other['host']})"


def _read(store: dist.Store, node: int, place: Place, minutes: float) -> dict[str, Any]:
    try:
        return json.loads(store.get(f"node{node}"))
    except RuntimeError as error:  # DistStoreError
        raise TrainingError(
            f"node {node} of {place.num_nodes} did not come to {place.describe()} within {minutes:g} minutes: is it started, with "
            f"NODE_RANK {node} and the same address? ({str(error).partition(chr(10))[0]})"
        ) from None


def _wait_for_readers(store: dist.Store, place: Place) -> None:
    store.add("disagreed", 1)
    deadline = time.monotonic() + _SECONDS_TO_COMPARE
    while place.rank == 0 and store.add("disagreed", 0) < place.world_size and time.monotonic() < deadline:
        time.sleep(0.1)


def meet(place: Place, terms: Mapping[str, str], minutes: float | None = None) -> dist.Store:
    """Wait for all nodes and compare. Called on all ranks; returns the store that they share.

    Args:
        terms: what must be the same on every node, as text.
        minutes: to wait; by default `place.minutes`.
    Raises:
        ConfigError: nodes differ, with each value and node; two nodes have the same number; rank 0 cannot listen.
        TrainingError: a node did not come.
    """
    minutes = place.minutes if minutes is None else minutes
    store = _open_store(place, minutes)
    sizes = {"number of ranks (WORLD_SIZE)": str(place.world_size), "ranks of a node": str(place.local_world_size)}
    own = {"node": place.node, "host": socket.gethostname(), "terms": sizes | dict(terms)}
    if place.local_rank == 0:
        if store.add(f"taken{place.node}", 1) > 1:
            raise ConfigError(f"NODE_RANK={place.node} is that of another node too: give each node its own, from 0 on")
        store.set(f"node{place.node}", json.dumps(own))
    for node in range(place.num_nodes):
        other = _read(store, node, place, minutes)
        first, second = (own, other) if place.node < node else (other, own)
        if lines := list(_differences(first, second)):
            _wait_for_readers(store, place)
            raise ConfigError("\n".join(["nodes differ in what must be the same on all:", *lines, "give each the same recipe and options"]))
    return store
