"""Elastic training, which continues when a host is lost and lets hosts join during the run."""
