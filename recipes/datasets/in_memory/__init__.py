"""Image sets that fit in memory: loader and base of data modules."""
