"""Peak memory of a step."""
