"""Estimates of memory, failures, pipelines and compression, and step timelines for the reports."""
