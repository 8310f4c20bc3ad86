"""Images in folders or shards: sources, decoding, crops, decoder threads and loaders."""
