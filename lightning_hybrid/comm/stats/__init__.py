"""Bytes and seconds of every bucket, phases of a step, rates of links, and the timeline of a run."""
