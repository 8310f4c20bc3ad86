"""`HybridElasticStrategy`: a run that continues when a host is lost, and admits hosts that join."""
