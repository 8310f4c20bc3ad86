"""Layers cut over the ranks of a node for the time of a fit, where a network asks for it."""
