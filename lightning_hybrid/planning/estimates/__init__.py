"""Estimates of memory, failures, pipelines, compression and step timelines for the reports."""
