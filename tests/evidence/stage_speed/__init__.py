"""Images per second and memory of a whole ResNet-50 and AlexNet-BN in stages, beside data parallelism and one rank."""
