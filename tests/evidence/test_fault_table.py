"""The table of faults says what happened, and says so where a promise was broken."""

from __future__ import annotations

import csv
from dataclasses import asdict, replace

import pytest

from tests.evidence.faults.table import FaultOutcome, markdown, read_outcomes, write_table

HELD = FaultOutcome(
    promise="named",
    fault="a rank dies",
    phase="backward",
    where="rank 1",
    detected_by="comm: rank 1 | does not answer",
    seconds=1.25,
    lost="1 step",
    is_held=True,
)
BROKEN = replace(HELD, seconds=None, lost="nothing", is_held=False)


def test_a_broken_promise_stands_out_and_is_counted():
    lines = markdown([HELD, BROKEN]).splitlines()
    assert lines[2].endswith("| 1.2            | 1 step  | yes  |")
    assert lines[3].endswith("| survived       | nothing | NO   |")
    assert lines[-1] == "1 of 2 held."


def test_words_of_an_error_cannot_break_the_table():
    cell = replace(HELD, detected_by="a | b\nc").cells()[4]
    assert cell == "a \\| b c"


def test_what_is_written_is_read_again(tmp_path):
    write_table(tmp_path, [HELD, BROKEN], config={"seed": 0}, title="a title")
    assert read_outcomes(tmp_path / "faults.json") == [HELD, BROKEN]
    assert (tmp_path / "table.md").read_text().startswith("a title\n\n| promise")
    with open(tmp_path / "table.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["is_held"] for row in rows] == ["True", "False"]
    assert list(rows[0]) == list(asdict(HELD))


@pytest.mark.parametrize("wrong", [{"where": " "}, {"seconds": -1.0}, {"seconds": float("nan")}], ids=str)
def test_a_row_that_tells_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` \\(="):
        replace(HELD, **wrong)
