"""Half-precision training on fp32 weights, as a Lightning precision plugin. `README.md` is the page for users."""
