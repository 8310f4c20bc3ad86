"""Layers that are cut over the ranks of a node during a fit, if a network asks for it by `node_slices`."""
