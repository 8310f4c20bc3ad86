"""Local steps: each node trains on its own for some steps, and then the nodes' weights are averaged."""
