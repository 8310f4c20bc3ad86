"""Module, configuration, resume and tracking of `train`."""
