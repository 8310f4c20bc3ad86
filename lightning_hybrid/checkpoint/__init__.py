"""Atomic checkpoint files with checksums, written while training continues."""
