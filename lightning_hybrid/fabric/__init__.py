"""Strategy `hybrid_allreduce` and its precision plugin for Lightning Fabric."""
