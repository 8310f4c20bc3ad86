"""Tables in Markdown."""

from collections.abc import Sequence


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table with aligned columns.

    >>> print(markdown_table(["lr", "loss"], [["0.1", "1.25"]]))
    | lr  | loss |
    |-----|------|
    | 0.1 | 1.25 |
    """
    lines = (header, *rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    text = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines]
    return "\n".join([text[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *text[1:]])
