"""The quick start: short, and what it says of itself is so."""

from __future__ import annotations

import re

import pytest

from tests.programs import run_program
from tests.test_readme import ROOT, python_blocks

QUICKSTART = ROOT / "recipes" / "quickstart.py"


def test_the_quick_start_is_as_long_as_a_page():
    assert len([line for line in QUICKSTART.read_text().splitlines() if line]) <= 50


def test_what_the_first_page_quotes_of_it_is_there_word_for_word():
    quoted = [block for block in python_blocks(ROOT / "README.md") if "_fork" in block or "kill_at_step" in block]
    assert [block for block in quoted if block not in QUICKSTART.read_text()] == []


@pytest.mark.long
def test_a_killed_run_goes_on_from_its_last_epoch_to_the_same_bits(tmp_path):
    done = run_program(str(QUICKSTART), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"on (\d) ranks from step (\d+)", done.stdout) == [("2", "0"), ("2", "0"), ("2", "45")]
    assert re.search("process 1 terminated|rank 1", done.stdout)  # by whichever is noticed first
    assert "same bits: True" in done.stdout
    assert [line[:3] for line in done.stdout.splitlines() if re.match(r"\d/3 ", line)] == ["1/3", "2/3", "3/3"]
    assert (tmp_path / re.findall(r"report: (.*)", done.stdout)[0]).is_file()
