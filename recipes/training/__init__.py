"""What `train` needs: the module, its configuration, resume, tracking."""
