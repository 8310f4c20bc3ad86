"""Elastic training: a run continues when a host is lost, and hosts can join it at any time."""
