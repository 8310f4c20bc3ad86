"""Lightning precision plugin for half-precision training with fp32 master weights (see `README.md`)."""
