"""Small image sets that fit into memory: digits and glyphs."""
