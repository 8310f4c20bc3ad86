"""Image datasets that fit in memory: loaders and the base class of data modules."""
