"""Rendezvous of ranks, including failures: every rank names the missing ones, and rank zero listens on loopback."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_hybrid.strategy import rendezvous
from lightning_hybrid.strategy.rendezvous import RendezvousError, meet
from tests.ports import free_port
from tests.scenes import at, fit

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
SHORT_S = 1.0
LONG_S = 30.0


def listening(port=None):
    """Return the addresses on which this process listens, in the kernel's notation, for `port` or for all ports."""
    descriptors = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            descriptors.add(os.readlink(descriptor))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    addresses = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, _, state, *_, inode = line.split()[1:10]
            address, _, hex_port = local.partition(":")
            is_listening = state == "0A" and f"socket:[{inode}]" in descriptors
            if is_listening and port in (None, int(hex_port, 16)):
                addresses.add(address)
    return addresses


def meeting(port, *, rank, world_size, timeout_s=LONG_S, address="127.0.0.1"):
    return meet(
        address=address,
        port=port,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def ranks_in_the_store(port):
    """Return the ranks that wrote to a new store, and the addresses on which this process listens."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    store = meeting(port, rank=rank, world_size=world_size)
    store.set(f"from {rank}", str(rank))
    ranks = sorted(int(store.get(f"from {member}")) for member in range(world_size))
    time.sleep(0.2)  # the store ends with rank zero
    return ranks, listening(port)


def test_all_ranks_get_one_store_that_listens_on_the_address_alone(three_ranks):
    results = three_ranks.run(ranks_in_the_store, free_port())
    for rank, (ranks, addresses) in enumerate(results):
        assert ranks == [0, 1, 2], f"rank {rank}"
        assert addresses <= LOOPBACK, f"rank {rank}"
        assert bool(addresses) == (rank == 0), f"rank {rank}"


def error_of_a_rendezvous(port, first_rank, world_size):
    """Return this process's error as rank `first_rank` plus its own rank, and the elapsed seconds."""
    start_s = time.monotonic()
    rank = first_rank + dist.get_rank()
    with pytest.raises(RendezvousError) as caught:
        meeting(port, rank=rank, world_size=world_size, timeout_s=SHORT_S)
    return str(caught.value), time.monotonic() - start_s


def test_missing_ranks_are_named_on_every_other_rank(two_ranks):
    port = free_port()
    expected = f"`WORLD_SIZE` (=4) ranks were expected at 127.0.0.1:{port}, but ranks 2, 3 did"
    results = two_ranks.run(error_of_a_rendezvous, port, 0, 4)
    for rank, (message, seconds) in enumerate(results):
        assert message.startswith(expected), f"rank {rank}"
        assert 0.9 * SHORT_S <= seconds < SHORT_S + rendezvous.GRACE_S, f"rank {rank}"


def test_a_missing_rank_zero_is_named_by_the_others(two_ranks):
    results = two_ranks.run(error_of_a_rendezvous, free_port(), 1, 3)
    host = socket.gethostname()
    for rank, (message, _) in enumerate(results, start=1):
        assert message.startswith("`MASTER_ADDR` and `MASTER_PORT` (=127.0.0.1:")
        assert f"rank {rank} on host {host} received no answer there within 1 s" in message


def test_the_second_process_of_a_rank_is_refused_and_the_others_meet(three_ranks):
    results = three_ranks.run(meet_as_rank_one_twice, free_port())
    assert results[0] == "met"
    (refused,) = [result for result in results[1:] if result != "met"]
    assert refused.startswith("`RANK` (=1) must be different in each process, but at ")


def meet_as_rank_one_twice(port):
    rank = min(dist.get_rank(), 1)
    store = None
    result = "met"
    try:
        store = meeting(port, rank=rank, world_size=2)
    except RendezvousError as error:
        result = str(error)
    dist.barrier()  # the store ends with rank zero
    del store
    return result


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            RendezvousError,
            match=rf"`MASTER_PORT` \(={port}\) cannot be opened by rank 0",
        ):
            meeting(port, rank=0, world_size=1)


def test_an_address_of_another_host_is_a_warning():
    """A foreign address is a warning, because a host behind NAT does not own its public address.

    192.0.2.1 is reserved for documentation (RFC 5737).
    """
    with pytest.warns(
        UserWarning, match=r"MASTER_ADDR \(=192\.0\.2\.1\) is not an address of this host"
    ):
        assert rendezvous._listen("192.0.2.1", free_port()) is None


def listens(trainer, module):
    """Return the addresses on which this process listens, on all ports and on the store's port."""
    return listening(), listening(int(os.environ["MASTER_PORT"]))


def fit_from_the_start():
    """Fit without an existing process group, as under a launcher."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port[0]),
        NODE_RANK="0",
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
    )
    seen = fit(None, max_epochs=1, devices=world_size, callbacks=[at(on_train_start=listens)])
    dist.destroy_process_group()
    return *seen.looks["on_train_start"][0], seen.global_step


def test_nothing_listens_beyond_the_address_and_the_interface_that_were_named(two_ranks):
    """No socket of any rank is reachable from outside if the store is at 127.0.0.1 and Gloo uses `lo`."""
    results = two_ranks.run(fit_from_the_start)
    for rank, (addresses, addresses_of_the_store, num_steps) in enumerate(results):
        assert addresses <= LOOPBACK, f"rank {rank}"
        assert bool(addresses_of_the_store) == (rank == 0), f"rank {rank}"
        assert num_steps == 4, f"rank {rank}"
