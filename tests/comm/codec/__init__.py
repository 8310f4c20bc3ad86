"""Tests of the codec between nodes."""
