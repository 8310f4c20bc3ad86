"""Hosts that fail and join during a run. Each host is a process, started by `tests.netlab.recovery`."""

from pathlib import Path
from typing import Any

import pytest

from tests.netlab import recovery
from tests.rank_pool import warm_context

OPTIONS = {
    "hosts": 2,
    "ranks": 1,
    "lost": 1,
    "losses": 1,
    "with": [],
    "precision": "16-true",
    "width": 32,
    "seed": 0,
}


def lose_hosts(folder: Path, **options: Any) -> dict[str, Any]:
    """Lose hosts, and compare every step with the reference."""
    warm_context()
    options = OPTIONS | {"silent_s": 2.0, "val_s": 0.02} | options
    run, losses = recovery.disturbed(options, folder / "run")
    parts = recovery.parts_of(run.rows)
    reference = recovery.reference(options, folder / "reference", parts)
    return recovery.report(run, losses, reference)


def assert_exact(report: dict[str, Any]) -> None:
    for fault in ("twice_or_missing", "with_two_digests", "differ_from_reference"):
        assert not report[fault], report


def test_a_run_continues_without_a_lost_host_and_admits_it_again_to_the_bit(tmp_path: Path) -> None:
    assert_exact(lose_hosts(tmp_path, kinds=["kill"]))


def test_the_first_step_of_a_view_has_the_bits_of_any_other_step(tmp_path: Path) -> None:
    """The first step averages gradients outside of DDP's buckets, in the same dtype and with the same loss scale."""
    warm_context()
    options = OPTIONS | {"silent_s": 2.0, "val_s": 0.02}
    in_one_view = recovery.reference(options, tmp_path / "one", [(0, 6, 2)])
    in_two_views = recovery.reference(options, tmp_path / "two", [(0, 3, 2), (3, 6, 2)])
    assert sorted(in_one_view) == list(range(6))
    assert in_two_views == in_one_view


def test_a_host_that_received_other_weights_is_named_before_a_step(tmp_path: Path) -> None:
    warm_context()
    options = OPTIONS | {"silent_s": 2.0, "val_s": 0.02}
    run = recovery.Hosts(options, tmp_path, {"end": 5, "min_hosts": 2, "spoilt": "ab"})
    for name in "ab":
        run.start(name)
    message = (
        r"ReplicaDriftError.*`head.bias` on rank 1 \(host .*\) differs from its value on rank 0"
    )
    with pytest.raises(RuntimeError, match=message):
        run.wait("an error", lambda: False)
    assert not any(row["event"] == "step" for row in run.rows)
    for name in "ab":
        run.end(name)


def test_a_long_run_with_default_options_trains(tmp_path: Path) -> None:
    """A run of `Trainer(max_steps=2000)` trains with no strategy options except those about hosts."""
    warm_context()
    options = OPTIONS | {"silent_s": 2.0, "val_s": 0.02}
    run = recovery.Hosts(options, tmp_path, {"end": 2_000, "min_hosts": 2})
    for host in "ab":
        run.start(host)

    def both_have_made_ten_steps() -> bool:
        return all(len(run.steps(host, hosts=2)[0]) >= 10 for host in "ab")

    run.wait("ten steps", both_have_made_ten_steps)
    for host in "ab":
        run.end(host)


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"ranks": 2, "kinds": ["split", "stop"], "losses": 2},
        {"ranks": 2, "kinds": ["kill"], "with": ["shard_update", "int8"]},
        {"kinds": ["validation", "checkpoint", "joining"], "losses": 3},
        {"hosts": 4, "lost": 2, "kinds": ["split"], "with": ["int8"]},
    ],
    ids=str,
)
def test_losses_at_any_moment_and_under_other_options_are_exact(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    assert_exact(lose_hosts(tmp_path, **options))
