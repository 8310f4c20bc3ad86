"""Communication statistics, with the traffic and times of buckets, step phases and a timeline."""
