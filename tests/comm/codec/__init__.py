"""Tests of the codec that compresses messages between nodes."""
