"""A tuned plan comes back as it was cached, for its own case only; a file that is no plan is named."""

from __future__ import annotations

import json

import pytest

from lightning_hybrid.comm import CommPlan
from lightning_hybrid.comm.tuning.change_detector import Baseline
from lightning_hybrid.comm.tuning.plan_cache import CachedPlan, default_folder, path_of, read_plan, write_plan

FACTS = {"nodes": [[0, 1], [2, 3]], "device": "cpu", "buckets": [[1000, "float16"]]}
PLAN = CommPlan(algorithm="hierarchical", chunk_bytes=2**20)


@pytest.mark.parametrize("level", [None, Baseline(seconds=0.25, sigma=0.01)])
def test_what_was_kept_is_read(tmp_path, level):
    cached = CachedPlan(plan=PLAN, ratio=0.9, num_steps=70, baseline=level)
    path = write_plan(tmp_path / "new", FACTS, cached)
    assert read_plan(tmp_path / "new", FACTS) == cached
    assert list((tmp_path / "new").iterdir()) == [path]  # nothing half written is left


def test_another_case_has_another_plan(tmp_path):
    write_plan(tmp_path, FACTS, CachedPlan(plan=PLAN, ratio=0.9, num_steps=70))
    assert read_plan(tmp_path, FACTS | {"device": "cuda"}) is None
    assert read_plan(tmp_path / "nowhere", FACTS) is None


def spoilt(**values):
    plan = json.loads(PLAN.to_json())
    whole = {"facts": FACTS, "plan": plan, "ratio": 0.9, "num_steps": 70, "level": None}
    return json.dumps(whole | values)


@pytest.mark.parametrize(
    "text",
    [
        "",
        spoilt()[:-20],
        "[]",
        spoilt(facts={}),
        spoilt(plan={"algorithm": "fastest"}),
        spoilt(plan={"speed": 1}),
        spoilt(num_steps="many"),
        spoilt(level={"seconds": 1.0}),
        spoilt(level=3),
    ],
)
def test_a_file_that_is_no_plan_of_this_case_is_named(tmp_path, text):
    path = path_of(tmp_path, FACTS)
    path.write_text(text)
    with pytest.raises(ValueError, match="holds no plan that can be used") as error:
        read_plan(tmp_path, FACTS)
    assert str(error.value).startswith(f"`{path}`")
    assert path.read_text() == text


def test_the_users_cache_is_where_others_keep_theirs(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "lightning_hybrid" / "plans"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "lightning_hybrid" / "plans"
