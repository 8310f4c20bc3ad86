"""Layers, scenarios and reports for `simulate` and `tune`."""
