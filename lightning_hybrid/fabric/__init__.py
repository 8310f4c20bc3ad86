"""The strategies of `hybrid_allreduce` and their precision, for Lightning Fabric."""
