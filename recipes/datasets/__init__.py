"""Image sets of the recipes, their packing into shards, and decoding by DALI."""
