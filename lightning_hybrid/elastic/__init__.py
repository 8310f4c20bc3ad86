"""Elastic training, in which a run continues when a host is lost, and hosts can join at any time."""
