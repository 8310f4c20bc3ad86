"""Images per second and memory of a whole ResNet-50 and AlexNet-BN in stages, data parallel, and on one rank."""
