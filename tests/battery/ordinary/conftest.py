"""Says at the end of a run how the cases of the battery went."""

from __future__ import annotations

from tests.battery.ordinary.tally import TALLY


def pytest_terminal_summary(terminalreporter):
    if TALLY.counts:
        terminalreporter.section("ordinary use, beside ddp in fp32")
        terminalreporter.write_line(TALLY.table())
