"""The `hybrid_allreduce` strategy and its precision plugin for Lightning Fabric."""
