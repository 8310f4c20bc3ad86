"""Prediction of training step times on a described cluster, and choice of a communication plan.

Training steps do not import this package.
"""
