"""The update shared within a node: each of its ranks has a part of masters and optimizer state, and all the weights."""
