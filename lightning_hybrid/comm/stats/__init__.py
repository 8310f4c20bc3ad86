"""Bytes and seconds of every bucket, and the timeline of a run."""
