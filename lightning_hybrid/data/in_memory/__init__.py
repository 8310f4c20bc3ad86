"""Small image sets that fit in memory: digits and glyphs."""
