"""Model of a cluster and of training steps on it, with links, collectives, buckets and plans."""
