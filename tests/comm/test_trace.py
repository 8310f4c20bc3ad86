import threading

from lightning_hybrid.comm.trace import CommSummary, CommTrace


class Clock:
    """Shows what it was set to."""

    now_s = 0.0

    def __call__(self):
        return self.now_s


def test_busy_is_the_union_and_exposed_the_tail_of_each_step():
    clock = Clock()
    trace = CommTrace(clock=clock)
    # A step: buckets in flight 1-4 and 3-6, backward over at 3; a pause; 10-11 and, the last, 12-13.
    for at_s, call in [
        (1, lambda: trace.begin(num_bytes=100, is_last=False)),
        (3, lambda: trace.begin(num_bytes=10, is_last=True)),
        (4, trace.end),
        (6, trace.end),
        (10, lambda: trace.begin(num_bytes=1, is_last=False)),
        (11, trace.end),
        (12, lambda: trace.begin(num_bytes=1, is_last=True)),
        (13, trace.end),
    ]:
        clock.now_s = at_s
        call()
    clock.now_s = 20
    assert trace.drain() == CommSummary(num_steps=2, num_buckets=4, num_bytes=112, busy_s=7.0, exposed_s=4.0)
    assert trace.drain() == CommSummary(num_steps=0, num_buckets=0, num_bytes=0, busy_s=0.0, exposed_s=0.0)


def test_a_last_bucket_that_is_done_before_the_others_is_exposed_until_they_are():
    clock = Clock()
    trace = CommTrace(clock=clock)
    trace.begin(num_bytes=1, is_last=False)
    trace.begin(num_bytes=1, is_last=True)
    clock.now_s = 1
    trace.end()
    clock.now_s = 5
    trace.end()
    assert trace.drain().exposed_s == 5.0


def test_draining_in_mid_flight_splits_the_times():
    clock = Clock()
    trace = CommTrace(clock=clock)
    trace.begin(num_bytes=1, is_last=True)
    clock.now_s = 2
    first = trace.drain()
    clock.now_s = 5
    trace.end()
    second = trace.drain()
    assert (first.busy_s, first.exposed_s, first.num_buckets) == (2.0, 2.0, 1)
    assert (second.busy_s, second.exposed_s, second.num_buckets) == (3.0, 3.0, 0)


def test_a_stream_is_counted_and_claims_no_times():
    trace = CommTrace()
    trace.count_untimed(num_bytes=8, is_last=True)
    assert trace.drain() == CommSummary(num_steps=1, num_buckets=1, num_bytes=8, busy_s=None, exposed_s=None)


def test_counts_survive_many_threads():
    trace = CommTrace()

    def work():
        for _ in range(2000):
            trace.begin(num_bytes=3, is_last=False)
            trace.end()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    drained = [trace.drain() for _ in range(50)]
    for thread in threads:
        thread.join()
    drained.append(trace.drain())
    assert sum(summary.num_buckets for summary in drained) == 8000
    assert sum(summary.num_bytes for summary in drained) == 24000
    assert all(summary.busy_s >= 0 for summary in drained)
