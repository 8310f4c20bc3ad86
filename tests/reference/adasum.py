"""Adasum in float64, straight from Maleki et al. 2020 (arXiv:2006.02924)."""

from functools import reduce


def pair(a, b):
    dot = a @ b
    squares = (a @ a, b @ b)
    of_a, of_b = (1 - dot / (2 * square) if square else 1 for square in squares)
    return of_a * a + of_b * b


def tree(gradients):
    """Combine a power of two of gradients pairwise: ((0 1) (2 3))."""
    gradients = [gradient.double() for gradient in gradients]
    while len(gradients) > 1:
        gradients = [pair(a, b) for a, b in zip(gradients[::2], gradients[1::2], strict=True)]
    return gradients[0]


def of_buckets(flats, numels, nodes):
    """Every rank's bucket -> what all hold afterwards but for the division by the ranks on a node: sums in the node."""
    of_nodes = [
        reduce(lambda a, b: a + b, [flats[rank].double() for rank in node]) for node in nodes
    ]
    return [tree(parts) for parts in zip(*(flat.split(numels) for flat in of_nodes), strict=True)]
