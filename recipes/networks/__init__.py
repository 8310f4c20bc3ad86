"""Networks of the recipes, counts of their floating-point operations, and peak FLOP/s of devices."""
