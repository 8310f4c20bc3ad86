"""Adasum of gradients between nodes, and its DDP communication hook."""
