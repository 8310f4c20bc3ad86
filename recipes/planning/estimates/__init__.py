"""Estimates behind the reports: memory of a rank, failures, schedules of pipelines, fewer bits between nodes."""
