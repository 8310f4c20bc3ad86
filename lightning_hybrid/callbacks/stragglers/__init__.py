"""Detection of slow ranks and slow network links that delay training on all ranks."""
