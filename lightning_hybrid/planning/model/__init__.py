"""Model of a cluster and of training steps on it: links, collectives, buckets, and the choice of a plan."""
