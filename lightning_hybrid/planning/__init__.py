"""Prediction of training step times on a described cluster, and choice of a communication plan.

No training step imports this package.
"""
