"""Programs that only maintainers run; each leaves a record: `python -m tests.evidence.<name>`."""
