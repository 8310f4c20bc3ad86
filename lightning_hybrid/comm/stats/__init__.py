"""Communication statistics: traffic and timing of buckets, step phases, and a timeline."""
