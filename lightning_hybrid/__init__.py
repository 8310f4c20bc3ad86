"""Large-batch, mixed-precision data-parallel training for PyTorch Lightning."""
