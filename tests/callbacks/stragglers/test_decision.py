"""Decision which ranks and links to report, from windows alone, without processes, clocks or links."""

from dataclasses import replace

import pytest

from lightning_hybrid.callbacks.stragglers.slow_links import SlowLinks
from lightning_hybrid.callbacks.stragglers.slow_ranks import SlowRanks, suspect_of
from lightning_hybrid.callbacks.stragglers.window import NUM_FIGURES, RankWindow
from lightning_hybrid.comm.health.link_rates import LinkRate
from lightning_hybrid.comm.stats.phases import Phase
from tests.callbacks.stragglers.generated import TRANSFER, USUAL, windows

COMPUTING = [Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CALLBACKS]
NUM_WINDOWS = 4


def slow_ranks(min_share=0.1):
    return SlowRanks(min_share=min_share, num_windows=NUM_WINDOWS)


def names(decision, *args, num_windows=NUM_WINDOWS, **options):
    """Return rank and phase of each report in the given number of windows with different noise."""
    reports = []
    for seed in range(num_windows):
        for slow_rank in decision.add(windows(*args, seed=seed, **options)):
            reports.append((slow_rank.rank, slow_rank.phase))
    return reports


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
@pytest.mark.parametrize("phase", COMPUTING)
def test_the_late_rank_and_its_phase_are_named_by_durations_alone(num_ranks, phase):
    slow = num_ranks - 1
    assert names(slow_ranks(), num_ranks, {(slow, phase): 60.0}, noise=0.2) == [(slow, phase)]


def test_cost_and_times_are_those_of_the_delay():
    (suspect,) = filter(
        None, (suspect_of(windows(4, {(2, Phase.BACKWARD): 60.0}), rank) for rank in range(4))
    )
    step = sum(USUAL.values()) + 60.0 + TRANSFER
    assert suspect.rank == 2
    assert suspect.cost_share == pytest.approx(60.0 / step)
    assert (suspect.phase_s, suspect.typical_s) == pytest.approx((0.140, 0.080))


def test_every_rank_of_a_slow_host_is_named():
    extra = {(rank, Phase.FORWARD): 60.0 for rank in (4, 5, 6, 7)}
    reports = names(slow_ranks(), 8, extra, noise=0.1)
    assert reports == [(rank, Phase.FORWARD) for rank in (4, 5, 6, 7)]


def test_nobody_is_named_below_the_share_or_for_fewer_windows():
    assert names(slow_ranks(), 4, {(1, Phase.FORWARD): 10.0}) == []
    assert names(slow_ranks(), 4, {(1, Phase.FORWARD): 60.0}, num_windows=NUM_WINDOWS - 1) == []
    decision = slow_ranks()
    for rank in (1, 1, 1, 0, 1, 1, 1):
        assert decision.add(windows(4, {(rank, Phase.FORWARD): 60.0})) == []


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_noise_on_all_ranks_names_nobody(num_ranks):
    """With noise, each phase takes twice its time on average, and in each step some rank is the last."""
    assert names(slow_ranks(), num_ranks, noise=1.0, num_windows=200, num_steps=20) == []


def test_a_difference_that_chance_explains_is_not_suspected():
    """The waits of ten steps vary by more than the apparent cost of the rank."""
    certain = windows(2, {(1, Phase.FORWARD): 30.0})
    assert suspect_of(certain, 1, min_share=0.1) is not None
    uncertain = [replace(window, wait_error_s=0.020) for window in certain]
    assert suspect_of(uncertain, 1, min_share=0.1) is None


def test_a_rank_is_reported_once_until_it_recovers():
    decision = slow_ranks()
    slow = {(1, Phase.FORWARD): 60.0}
    assert names(decision, 4, slow, num_windows=10) == [(1, Phase.FORWARD)]
    assert decision.named[1].phase is Phase.FORWARD
    assert names(decision, 4) == []
    assert [slow_rank.rank for slow_rank in decision.take_recovered()] == [1]
    assert decision.named == {}
    assert names(decision, 4, slow) == [(1, Phase.FORWARD)]


def test_another_phase_of_a_named_rank_is_reported_too():
    decision = slow_ranks()
    names(decision, 4, {(1, Phase.FORWARD): 60.0})
    assert names(decision, 4, {(1, Phase.OPTIMIZER): 60.0}) == [(1, Phase.OPTIMIZER)]


def test_a_rank_whose_phases_are_as_fast_as_others_is_not_blamed_for_waiting_less():
    """A rank behind a slow link receives the all-reduce later, which is not caused by its own phases."""
    late = []
    for rank, window in enumerate(windows(4)):
        wait_s = 0.0 if rank == 1 else 0.060
        phases_s = {**window.phases_s, Phase.WAIT: wait_s}
        late.append(RankWindow(step_s=0.2, phases_s=phases_s))
    assert [suspect_of(late, rank) for rank in range(4)] == [None] * 4


def test_a_wait_in_collectives_of_callbacks_points_at_the_rank_that_is_late_for_them():
    """Rank 3 is slow in its optimizer, and the others wait in a callback's collective instead of a bucket's."""
    found = []
    for rank, window in enumerate(windows(4)):
        phase = Phase.OPTIMIZER if rank == 3 else Phase.CALLBACKS
        phases_s = {**window.phases_s, phase: window.phases_s[phase] + 0.1}
        found.append(RankWindow(step_s=window.step_s + 0.1, phases_s=phases_s))
    suspects = [suspect_of(found, rank, min_share=0.1) for rank in range(4)]
    assert suspects[:3] == [None] * 3
    assert suspects[3].phase is Phase.OPTIMIZER


def test_a_window_fits_into_64_bytes_and_survives_the_way():
    window = windows(2, links={0: LinkRate(bytes_per_s=2.0**20, node=7)})[0]
    figures = window.to_figures()
    assert len(figures) == NUM_FIGURES
    assert 4 * NUM_FIGURES <= 64
    assert RankWindow.from_figures(figures) == window


# ---- links -----------------------------------------------------------------------------------------


NODES = (0, 1, 2, 3)
FAST = 12.5e6


def ring(slow_links, *, transfer=100.0, extra=None):
    """Return a window of four nodes in a ring, in which some links, by sender, have half the bandwidth."""
    links = {}
    for node in NODES:
        rate = FAST / 2 if node in slow_links else FAST
        links[node] = LinkRate(bytes_per_s=rate, node=(node + 1) % 4)
    return windows(4, extra, transfer=transfer, links=links)


def judge_links(*many_windows, nodes=NODES):
    """Return the places of all reports."""
    links = SlowLinks(nodes=nodes, min_share=0.1, num_windows=NUM_WINDOWS)
    ranks = slow_ranks()
    reports = []
    for of_ranks in many_windows:
        ranks.add(of_ranks)
        report = links.add(of_ranks, has_suspect=ranks.has_suspect)
        if report is not None:
            reports.append(report.ends)
    return reports


@pytest.mark.parametrize(
    ("slow", "place"), [({1}, (1, 2)), ({0, 1}, (1, None)), ({3}, (3, 0)), (set(), None)], ids=str
)
def test_the_slow_link_is_named_from_the_first_windows_on(slow, place):
    """A NIC at half its bandwidth slows both the data that its node sends and the data that it receives."""
    expected = [] if place is None else [place]
    assert judge_links(*[ring(slow)] * NUM_WINDOWS) == expected


def test_a_slow_link_behind_which_no_rank_waits_is_not_named():
    assert judge_links(*[ring({1}, transfer=1.0)] * NUM_WINDOWS) == []


def test_a_late_rank_is_no_slow_link():
    late = ring({1}, extra={(2, Phase.BACKWARD): 100.0})
    assert judge_links(*[late] * NUM_WINDOWS) == []


def two_nodes(rate, transfer=100.0):
    links = {node: LinkRate(bytes_per_s=rate, node=1 - node) for node in (0, 1)}
    return windows(2, transfer=transfer, links=links)


def test_both_links_of_a_node_are_reported_once_though_one_alone_is_slow_in_some_windows():
    both = [ring({0, 1})] * NUM_WINDOWS
    alone = [ring({1})] * NUM_WINDOWS
    assert judge_links(*both, *alone) == [(1, None)]
    assert judge_links(*alone, *both, *[ring({3})] * NUM_WINDOWS) == [(1, 2), (3, 0)]
    assert judge_links(*both, *[ring({2, 3})] * NUM_WINDOWS) == [(1, None), (3, None)]


def test_of_two_nodes_the_link_is_compared_with_what_it_carried_before():
    before = [two_nodes(FAST)] * NUM_WINDOWS
    after = [two_nodes(FAST / 2)] * NUM_WINDOWS
    assert judge_links(*after, nodes=(0, 1)) == []
    assert judge_links(*before, *after, nodes=(0, 1)) == [(0, 1)]


def test_without_rates_a_wait_of_all_ranks_that_has_grown_is_a_link_without_a_name():
    before = [windows(4)] * NUM_WINDOWS
    after = [windows(4, transfer=80.0)] * NUM_WINDOWS
    assert judge_links(*before, *after) == [(None, None)]
    assert judge_links(*after) == []
    assert judge_links(*before, *after, nodes=(0, 0, 0, 0)) == []


def test_a_link_is_reported_once_until_it_recovers():
    links = SlowLinks(nodes=NODES, min_share=0.1, num_windows=NUM_WINDOWS)
    reports = [links.add(ring({1}), has_suspect=False) for _ in range(10)]
    assert [report.ends for report in reports if report is not None] == [(1, 2)]
    for _ in range(NUM_WINDOWS):
        assert links.take_recovered() is None
        links.add(ring(set()), has_suspect=False)
    assert links.take_recovered().ends == (1, 2)
    assert links.named is None
