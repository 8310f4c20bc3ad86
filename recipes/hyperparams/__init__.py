"""Searches over hyper-parameters."""
