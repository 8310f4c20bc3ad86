"""Times all-reduces, steps, updates and input, each arm in turns within one run."""
