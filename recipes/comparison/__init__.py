"""Comparison of training methods: definition of variants, execution of training runs, and paired statistics."""
