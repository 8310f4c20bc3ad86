"""Statistics of communication: bytes and seconds of buckets, phases of a step, rates of links, and the timeline."""
