"""Hyper-parameter search with Optuna, with trials in parallel processes."""
