"""Imports of the fork server, which every forked rank inherits within hundredths of a second."""

import atexit
import gc

import hypothesis  # noqa: F401  tests import it
import pytest  # noqa: F401
import sklearn.datasets  # noqa: F401  digits
import torch.distributed.pipelining  # noqa: F401  a second in every rank that runs a pipeline

import lightning_hybrid.callbacks  # noqa: F401
import tests.toy  # noqa: F401

gc.collect()
gc.freeze()  # a rank's collector need not look at all that again
atexit.register(gc.unfreeze)  # what lives on at the exit is called a leak by bindings
