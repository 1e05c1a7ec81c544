"""Ranks that look for each other: those of nodes that agree, that differ, that do not come. Each rank is a thread here."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from swiftcp.errors import ConfigError, SwiftcpError, TrainingError
from swiftcp.launch import LOOPBACK, free_port
from swiftcp.parallel.rendezvous import Place, meet


def place(rank: int, port: int, *, world_size: int = 4, local_world_size: int = 2) -> Place:
    return Place(rank, world_size, rank % local_world_size, local_world_size, LOOPBACK, port)


def meet_all(places: Sequence[Place], terms: Sequence[Mapping[str, str]], minutes: float = 0.5) -> list[dist.Store | SwiftcpError]:
    """What each rank gets: the store, or its error."""

    def one(rank: Place, its_terms: Mapping[str, str]) -> dist.Store | SwiftcpError:
        try:
            return meet(rank, its_terms, minutes)
        except SwiftcpError as error:
            return error

    with ThreadPoolExecutor(len(places)) as threads:
        return list(threads.map(one, places, terms))


def test_nodes_that_agree_share_a_store():
    port = free_port()
    stores = meet_all([place(rank, port) for rank in range(4)], [{"lr": "1e-05"}] * 4)
    assert all(isinstance(store, dist.Store) for store in stores)
    stores[3].set("key", "value")  # type: ignore[union-attr]
    assert stores[0].get("key") == b"value"  # type: ignore[union-attr]


def test_every_rank_hears_which_key_differs_and_where():
    port = free_port()
    terms = [{"lr": "1e-05", "seed": "1"}] * 2 + [{"lr": "2e-05", "seed": "1"}] * 2
    for error in meet_all([place(rank, port) for rank in range(4)], terms):
        assert isinstance(error, ConfigError)
        assert f"lr: 1e-05 on node 0 ({socket.gethostname()}), 2e-05 on node 1 (" in str(error) and "seed" not in str(error)


def test_nodes_that_count_ranks_differently_do_not_wait():
    port = free_port()
    places = [*(place(rank, port) for rank in range(2)), place(1, port, world_size=2, local_world_size=1)]
    for error in meet_all(places, [{}] * 3):
        assert isinstance(error, ConfigError)
        assert "number of ranks (WORLD_SIZE): 4 on node 0" in str(error) and "2 on node 1" in str(error)


def test_a_node_that_does_not_come_is_named():
    port = free_port()
    for error in meet_all([place(rank, port) for rank in range(2)], [{}] * 2, minutes=0.02):
        assert isinstance(error, TrainingError)
        assert f"node 1 of 2 did not come to MASTER_ADDR=127.0.0.1, MASTER_PORT={port}" in str(error)


def test_a_first_node_that_does_not_come_is_named():
    [error] = meet_all([place(2, free_port())], [{}], minutes=0.02)
    assert isinstance(error, TrainingError) and "node 1 did not reach rank 0" in str(error)


def test_two_nodes_of_one_number_are_refused():
    port = free_port()
    errors = meet_all([place(0, port), place(2, port), place(2, port)], [{}] * 3, minutes=0.1)
    assert len([error for error in errors if isinstance(error, ConfigError) and "NODE_RANK=1 is that of another" in str(error)]) == 1


def test_a_port_in_use_is_named():
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        port = listener.getsockname()[1]
        [error] = meet_all([place(0, port)], [{}], minutes=0.02)
    assert isinstance(error, ConfigError) and f"MASTER_PORT={port}" in str(error)


@pytest.mark.parametrize(("address", "minutes"), [("127.0.0.1", 2), ("node0", 10)])
def test_nodes_on_the_loopback_wait_less(address, minutes):
    assert Place(0, 4, 0, 2, address, 1).minutes == minutes
