"""The quick start: short, and what it says of itself is so."""

import re

import pytest

from tests.checkout import ROOT
from tests.programs import run_program

QUICKSTART = ROOT / "recipes" / "quickstart.py"


def test_the_quick_start_is_as_long_as_a_page():
    assert len([line for line in QUICKSTART.read_text().splitlines() if line]) <= 50


@pytest.mark.long
def test_a_killed_run_goes_on_from_its_last_epoch_to_the_same_bits(tmp_path):
    done = run_program(str(QUICKSTART), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"on (\d) ranks from step (\d+)", done.stdout) == [("2", "0"), ("2", "0"), ("2", "45")]
    assert re.search("process 1 terminated|rank 1", done.stdout)  # by whichever is noticed first
    assert "same bits: True" in done.stdout
    assert [line[:3] for line in done.stdout.splitlines() if re.match(r"\d/3 ", line)] == ["1/3", "2/3", "3/3"]
    assert (tmp_path / re.findall(r"report: (.*)", done.stdout)[0]).is_file()
