"""Comparison of the planner's predictions with published and measured runs."""
