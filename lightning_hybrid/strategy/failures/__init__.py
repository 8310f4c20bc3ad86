"""Failure reports that name the failed rank and the cause, on every rank and in torchrun's error file."""
