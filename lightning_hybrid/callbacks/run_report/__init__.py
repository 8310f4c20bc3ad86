"""The report of a run: figures, a page and a summary."""
