"""Pipelines: blocks of a network in stages, through which the micro-batches of a step pass one after another."""
