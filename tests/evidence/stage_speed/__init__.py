"""Images per second and memory of a whole ResNet-50 and AlexNet-BN in stages, against data parallelism and one rank."""
