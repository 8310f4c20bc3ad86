"""Adasum of gradients between nodes, with its DDP communication hook."""
