"""Failure reports that name the failed rank and the cause, for every rank and for torchrun."""
