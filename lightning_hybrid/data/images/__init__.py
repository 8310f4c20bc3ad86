"""Images in folders, shards or made up: sources, decoding, crops, threads, loaders."""
