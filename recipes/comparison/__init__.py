"""Comparison of training methods: variants, their fits in an Optuna journal, and paired statistics."""
