"""The table of metrics is complete: what is logged is explained, and the other way round."""

from lightning_hybrid.callbacks import metrics
from lightning_hybrid.callbacks.metrics import METRICS


def test_every_name_has_one_entry_with_a_group_a_unit_and_a_sentence():
    names = {value for name, value in vars(metrics).items() if name.isupper() and isinstance(value, str)}
    assert names == set(METRICS)
    for metric in METRICS.values():
        group, _, name = metric.name.partition("/")
        assert group in ("train", "data", "comm", "throughput", "memory", "val", "test", "time", "time_to_accuracy")
        assert name.isidentifier()
        assert metric.unit in ("1", "s", "1/s", "B", "B/s")
        assert metric.from_clock or "s" not in metric.unit
        assert metric.meaning[0].isupper()
        assert metric.meaning.endswith(".")
