"""Reports of the planner: sentences, tables, JSON and pictures."""
