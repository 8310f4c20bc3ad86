"""Adasum reduction of gradients between nodes, and the DDP communication hook that applies it."""
