"""Comparison of training methods: variants, training runs in an Optuna journal, and paired statistics."""
