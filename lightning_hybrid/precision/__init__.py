"""Half-precision training with fp32 master weights, as a Lightning precision plugin (see `README.md`)."""
