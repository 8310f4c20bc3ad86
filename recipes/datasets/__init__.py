"""Image sets of the recipes, and their packing into shards."""
