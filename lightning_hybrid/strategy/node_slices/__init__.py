"""Tensor parallelism within a node, for layers that a network lists in its attribute `node_slices`."""
