"""What the recipes add to Lightning's callbacks: exact repetition, checkpoints within an epoch, a progress bar."""
