"""Performance model of training steps on a cluster, with links, collectives, buckets and plans."""
