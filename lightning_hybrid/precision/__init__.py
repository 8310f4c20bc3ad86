"""A half-precision model on fp32 masters, as a Lightning precision plugin. What a user sees of it: `README.md`."""
