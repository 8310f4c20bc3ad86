"""Markdown tables, sizes and times as text."""

from collections.abc import Sequence

KIB = 2**10
MIB = 2**20


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with aligned columns.

    >>> print(markdown_table(["lr", "loss"], [["0.1", "1.25"]]))
    | lr  | loss |
    |-----|------|
    | 0.1 | 1.25 |
    """
    lines = (header, *rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = [
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    return "\n".join(
        [text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]]
    )


def size(num_bytes: int) -> str:
    """Format a number of bytes: 4 KiB, 8 MiB, 97.5 MiB, 1000 B.

    >>> size(4096), size(8 * MIB), size(102_228_128), size(1000)
    ('4 KiB', '8 MiB', '97.5 MiB', '1000 B')
    """
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}"
    return f"{num_bytes} B"


def time_text(seconds: float) -> str:
    """Format a time in the unit that suits it.

    >>> [time_text(seconds) for seconds in (0.0, 3.2e-4, 0.065, 11.0, 400.0, 8100.0)]
    ['0 ms', '0.32 ms', '65 ms', '11 s', '6.67 min', '2.25 h']
    """
    limits = ((1.0, 1e3, "ms"), (120.0, 1.0, "s"), (7200.0, 1 / 60, "min"))
    factor, unit = next(
        ((factor, unit) for limit, factor, unit in limits if seconds < limit), (1 / 3600, "h")
    )
    return (
        f"{factor * seconds:,.3g} {unit}"
        if factor * seconds < 1000
        else f"{factor * seconds:,.0f} {unit}"
    )
