"""Sources, decoding, cropping and loaders for images that are stored in folders or shards."""
