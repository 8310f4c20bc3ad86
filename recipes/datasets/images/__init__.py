"""Images in folders or shards: sources, decoding, crops, threads, loaders."""
