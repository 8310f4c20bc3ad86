"""Formatting of Markdown tables, byte sizes, counts and durations."""

from collections.abc import Sequence

KIB = 2**10
MIB = 2**20


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a Markdown table with aligned columns.

    >>> print(markdown_table(["lr", "loss"], [["0.1", "1.25"]]))
    | lr  | loss |
    |-----|------|
    | 0.1 | 1.25 |
    """
    widths = [len(cell) for cell in header]
    for row in rows:
        for column in range(len(header)):
            widths[column] = max(widths[column], len(row[column]))

    dashes = ["-" * (width + 2) for width in widths]
    lines = [_table_line(header, widths), f"|{'|'.join(dashes)}|"]
    for row in rows:
        lines.append(_table_line(row, widths))
    return "\n".join(lines)


def _table_line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return f"| {' | '.join(padded)} |"


def size(num_bytes: int) -> str:
    """Format a number of bytes as text in B, KiB or MiB.

    >>> size(4096), size(8 * MIB), size(102_228_128), size(1000)
    ('4 KiB', '8 MiB', '97.5 MiB', '1000 B')
    """
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


def counted(number: int, noun: str) -> str:
    """Format a count with its noun, in the singular or plural.

    >>> counted(1, "node"), counted(4, "node")
    ('1 node', '4 nodes')
    """
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}s"


def time_text(seconds: float) -> str:
    """Format a duration in milliseconds, seconds, minutes or hours, depending on its length.

    >>> [time_text(seconds) for seconds in (0.0, 3.2e-4, 0.065, 11.0, 400.0, 8100.0)]
    ['0 ms', '0.32 ms', '65 ms', '11 s', '6.67 min', '2.25 h']
    """
    if seconds < 1:
        return f"{_number_text(1e3 * seconds)} ms"
    if seconds < 120:
        return f"{_number_text(seconds)} s"
    if seconds < 7200:
        return f"{_number_text(1 / 60 * seconds)} min"
    return f"{_number_text(1 / 3600 * seconds)} h"


def _number_text(value: float) -> str:
    if value < 1000:
        return f"{value:,.3g}"
    return f"{value:,.0f}"
