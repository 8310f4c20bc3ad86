"""Adasum in float64, implemented directly from Maleki et al. 2020 (arXiv:2006.02924)."""

from functools import reduce


def pair(a, b):
    dot = a @ b
    squares = (a @ a, b @ b)
    of_a, of_b = (1 - dot / (2 * square) if square else 1 for square in squares)
    return of_a * a + of_b * b


def tree(gradients):
    """Combine gradients pairwise as ((0 1) (2 3)). Their number must be a power of two."""
    gradients = [gradient.double() for gradient in gradients]
    while len(gradients) > 1:
        gradients = [pair(a, b) for a, b in zip(gradients[::2], gradients[1::2], strict=True)]
    return gradients[0]


def of_buckets(flats, numels, nodes):
    """Return the result on all ranks, before the division by the ranks of a node. Nodes add their buckets first."""
    of_nodes = [
        reduce(lambda a, b: a + b, [flats[rank].double() for rank in node]) for node in nodes
    ]
    return [tree(parts) for parts in zip(*(flat.split(numels) for flat in of_nodes), strict=True)]
