"""Accuracy and bytes between nodes of steps that each node takes on its own, on glyphs, with nodes in one process."""
