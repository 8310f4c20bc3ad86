"""Statistics of communication: bytes and seconds of every bucket, and a timeline of the run."""
