"""Estimates behind the reports: memory, failures, pipelines, fewer bits between nodes; the timeline of a step."""
