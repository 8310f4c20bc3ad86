"""Measurement of links and all-reduces, and calibration of a cluster description with the results."""
