"""Reports of the planner as sentences, tables, JSON and pictures."""
