"""Estimates behind the reports: memory, failures, pipelines, fewer bits between nodes. The timeline of a step."""
