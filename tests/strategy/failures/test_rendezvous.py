"""A rendezvous, and ones that fail: every rank names who is missing, and rank zero listens only where it should."""

import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_hybrid.strategy import rendezvous
from lightning_hybrid.strategy.rendezvous import RendezvousError, meet
from tests.scenes import at, fit

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
SHORT_S = 1.0
LONG_S = 30.0


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def listening(port=None):
    """Addresses, as the kernel writes them, at which this process listens. At `port` alone if it is given."""
    mine = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            mine.add(os.readlink(each))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    result = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            local, _, state, *_, inode = line.split()[1:10]
            address, _, at = local.partition(":")
            if state == "0A" and f"socket:[{inode}]" in mine and port in (None, int(at, 16)):
                result.add(address)
    return result


def meeting(port, *, rank, world_size, timeout_s=LONG_S, address="127.0.0.1"):
    return meet(
        address=address,
        port=port,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def meets(port, num_missing, numbers, timeout_s):
    """`numbers`: the rank that each process takes."""
    rank = dist.get_rank()
    begun_s = time.monotonic()
    try:
        store = meeting(
            port,
            rank=numbers[rank],
            world_size=len(set(numbers)) + num_missing,
            timeout_s=timeout_s,
        )
    except RendezvousError as error:
        return str(error), time.monotonic() - begun_s, set()
    store.set(f"from {rank}", str(rank))
    results = sorted(int(store.get(f"from {other}")) for other in range(len(numbers)))
    time.sleep(0.2)  # the store goes with rank zero
    return results, 0.0, listening(port)


def test_all_ranks_get_one_store_that_listens_on_the_address_alone(three_ranks):
    results = three_ranks.run(meets, free_port(), 0, [0, 1, 2], LONG_S)
    assert [result[0] for result in results] == [[0, 1, 2]] * 3
    assert [result[2] <= LOOPBACK for result in results] == [True] * 3
    assert [bool(result[2]) for result in results] == [True, False, False]


def test_who_did_not_come_is_named_on_every_rank_that_did(two_ranks):
    port = free_port()
    results = two_ranks.run(meets, port, 2, [0, 1], SHORT_S)
    for words, seconds, _ in results:
        assert words.startswith(
            f"`WORLD_SIZE` (=4) ranks must meet at 127.0.0.1:{port}, and within 1 s ranks 2, 3 did"
        )
        assert 0.9 * SHORT_S <= seconds < SHORT_S + rendezvous.GRACE_S


def test_a_rank_zero_that_never_comes_is_named_by_the_others(two_ranks):
    results = two_ranks.run(meets, free_port(), 1, [1, 2], SHORT_S)
    for place, (words, _, _) in enumerate(results):
        assert words.startswith("`MASTER_ADDR` and `MASTER_PORT` (=127.0.0.1:")
        assert (
            f"rank {place + 1} on host {socket.gethostname()} had no answer there within 1 s"
            in words
        )


def test_the_second_process_of_a_rank_is_sent_away_and_the_others_meet(three_ranks):
    results = three_ranks.run(meets_but_one, free_port())
    assert results[0] == "met"
    (refused,) = [result for result in results[1:] if result != "met"]
    assert refused.startswith("`RANK` (=1) must be different on each process: process ")


def meets_but_one(port):
    rank = min(dist.get_rank(), 1)
    store = None
    result = "met"
    try:
        store = meeting(port, rank=rank, world_size=2)
    except RendezvousError as error:
        result = str(error)
    dist.barrier()  # the store goes with rank zero
    del store
    return result


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            RendezvousError, match=rf"`MASTER_PORT` \(={port}\) must be a port that rank 0 may open"
        ):
            meeting(port, rank=0, world_size=1)


def test_an_address_that_is_not_this_hosts_is_warned_of():
    """192.0.2.1 is for documentation (RFC 5737): such as the outer address of a host behind a translator."""
    with pytest.warns(
        UserWarning, match=r"MASTER_ADDR \(=192\.0\.2\.1\) is not an address of this host"
    ):
        assert rendezvous._listen("192.0.2.1", free_port()) is None


def listens(trainer, module):
    return listening(), listening(int(os.environ["MASTER_PORT"]))


def fit_from_the_start():
    """Fit as under a launcher: without a process group."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    port = [free_port()]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    variables = {
        "MASTER_PORT": port[0],
        "NODE_RANK": 0,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
    }
    os.environ.update(
        {name: str(value) for name, value in variables.items()} | {"MASTER_ADDR": "127.0.0.1"}
    )
    seen = fit(None, max_epochs=1, devices=world_size, callbacks=[at(on_train_start=listens)])
    dist.destroy_process_group()
    return *seen.looks["on_train_start"][0], seen.global_step


def test_nothing_listens_beyond_the_address_and_the_interface_that_were_named(two_ranks):
    """The store at 127.0.0.1, Gloo on the pool's interface `lo`: no socket of any rank takes words from outside."""
    results = two_ranks.run(fit_from_the_start)
    for everywhere, _, num_steps in results:
        assert everywhere <= LOOPBACK
        assert num_steps == 4
    assert [bool(of_the_store) for _, of_the_store, _ in results] == [True, False]
