"""Loaders and the base class of data modules for image datasets that fit in memory."""
