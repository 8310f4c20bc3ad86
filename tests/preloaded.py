"""Imports of the fork server. Every forked rank inherits them, so it starts within hundredths of a second."""

import atexit
import gc

import hypothesis  # noqa: F401  tests import it
import pytest  # noqa: F401
import sklearn.datasets  # noqa: F401  for the digits data set
import torch.distributed.pipelining  # noqa: F401  a second in every rank that runs a pipeline

import lightning_hybrid.callbacks  # noqa: F401
import tests.toy  # noqa: F401

gc.collect()
gc.freeze()  # garbage collection in the ranks skips these objects
atexit.register(gc.unfreeze)  # bindings report objects that are still alive at exit as leaks
