"""Comparison of ways to train: arms, their fits in an Optuna journal, and paired statistics."""
