"""Warnings, metrics and the report panel of the straggler monitor."""

import json
from unittest.mock import patch

import pytest

from lightning_hybrid.callbacks import RunReport, StragglerMonitor
from lightning_hybrid.callbacks import metrics as m
from lightning_hybrid.callbacks.stragglers.gather import HostGather, Hosts
from lightning_hybrid.callbacks.stragglers.messages import (
    describe_slow_link,
    describe_slow_rank,
    straggler_metrics,
)
from lightning_hybrid.callbacks.stragglers.slow_links import SlowLink
from lightning_hybrid.callbacks.stragglers.slow_ranks import SlowRank
from lightning_hybrid.comm.health.link_rates import LinkRate
from lightning_hybrid.comm.stats.phases import Phase
from tests import toy
from tests.callbacks.stragglers import cases
from tests.callbacks.stragglers.generated import windows
from tests.scenes import Keeps

HOSTS = Hosts(
    ranks=(4, 5, 6),
    nodes=(0, 1, 1),
    node_names={0: "a", 1: "b"},
    node_of_address={},
)


@pytest.mark.parametrize(
    ("phase", "phase_s", "typical_s", "words"),
    [
        (
            Phase.BACKWARD,
            0.19,
            0.1,
            "backward takes 1.9 times the median, which costs 21 % of every step",
        ),
        (Phase.INPUT, 0.15, 0.001, "waiting for data takes 150 ms (the median is 1 ms)"),
        (Phase.OPTIMIZER, 0.15, 0.0, "the optimizer's step takes 150 ms (the median is 0 ms)"),
    ],
    ids=str,
)
def test_a_warning_names_rank_host_phase_and_cost(phase, phase_s, typical_s, words):
    slow_rank = SlowRank(rank=1, phase=phase, phase_s=phase_s, typical_s=typical_s, cost_share=0.21)
    assert describe_slow_rank(slow_rank, HOSTS).startswith(f"rank 5 on host b is slow: {words}")


@pytest.mark.parametrize(
    ("sender", "receiver", "name"),
    [
        (0, 1, "the link from host a to host b"),
        (1, None, "the link of host b"),
        (None, None, "a link between the nodes"),
    ],
    ids=str,
)
def test_a_warning_names_the_link(sender, receiver, name):
    slow_link = SlowLink(
        sender=sender,
        receiver=receiver,
        bytes_per_s=5.9e6,
        usual_bytes_per_s=12.1e6,
        wait_share=0.43,
    )
    text = describe_slow_link(slow_link, HOSTS)
    assert text.startswith(f"{name} is slow: it carries 5.9 MB/s instead of the usual 12.1 MB/s")
    assert text.endswith("every rank waits 43 % of each step for gradients")


def test_metrics_are_those_of_the_slowest_rank():
    links = {0: LinkRate(bytes_per_s=8.0, node=1)}
    of_ranks = windows(3, {(1, Phase.FORWARD): 60.0}, links=links)
    named = [SlowRank(rank=1, phase=Phase.FORWARD, phase_s=0.1, typical_s=0.04, cost_share=0.3)]
    values = straggler_metrics(of_ranks, HOSTS, named)
    assert values == pytest.approx(
        {
            m.STRAGGLER_COST_SHARE: 60 / 198,
            m.STRAGGLER_WAIT_SHARE: 5 / 198,
            m.STRAGGLER_RANK: 5.0,
            m.STRAGGLER_LINK_BYTES_PER_S: 8.0,
            m.STRAGGLER_EXCESS_S["input"]: 0.0,
            m.STRAGGLER_EXCESS_S["forward"]: 0.060,
            m.STRAGGLER_EXCESS_S["backward"]: 0.0,
            m.STRAGGLER_EXCESS_S["optimizer"]: 0.0,
            m.STRAGGLER_EXCESS_S["callbacks"]: 0.0,
        },
        abs=1e-9,
    )
    assert m.STRAGGLER_RANK not in straggler_metrics(of_ranks, HOSTS, [])


def reported(folder):
    """Return the rows of the logger on this rank, in a fit with synthetic windows."""
    of_ranks = windows(2, {(1, Phase.FORWARD): 60.0})
    logger = Keeps()
    with patch.object(HostGather, "gather", lambda gather, window: [of_ranks] * gather._is_first):
        cases.run(
            cases.Delays(forward_s=0.0, backward_s=0.0),
            window=2,
            num_windows=4,
            is_stopped=False,
            logger=logger,
            log_every_n_steps=2,
            more=[RunReport(folder)],
        )
    return logger.rows


def test_a_run_logs_the_slow_rank_and_its_page_shows_it(two_ranks, tmp_path):
    rows, _ = two_ranks.run(reported, str(tmp_path))
    assert [step for step, row in rows if m.STRAGGLER_COST_SHARE in row] == [2, 4, 6, 8]
    assert {row[m.STRAGGLER_RANK] for step, row in rows if step == 8} == {1.0}
    assert json.loads((tmp_path / "curves.json").read_text())[m.STRAGGLER_COST_SHARE]
    page = (tmp_path / "run.html").read_text()
    assert "is slow: forward takes 2.5 times the median" in page
    assert "Waiting for the slowest rank" in page


def test_a_monitor_that_has_judged_nothing_is_not_in_the_report():
    assert StragglerMonitor().describe() == "not measured"
    trainer = toy.trainer(callbacks=[StragglerMonitor()])
    assert "stragglers" not in RunReport().findings(trainer)
