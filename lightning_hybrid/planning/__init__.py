"""Prediction of training steps on described clusters, and choice of a communication plan.

No training step imports this package.
"""
