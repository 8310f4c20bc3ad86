"""Public classes of this package for each import name of Lightning.

    lightning.pytorch    lightning_pytorch.py    `from lightning_hybrid import HybridAllReduceStrategy`
    pytorch_lightning    pytorch_lightning.py    `from lightning_hybrid.flavours.pytorch_lightning import ...`
    lightning.fabric     fabric.py               `from lightning_hybrid.flavours.fabric import ...`
    lightning_fabric     lightning_fabric.py     `from lightning_hybrid.flavours.lightning_fabric import ...`

The implementations are in `strategy/`, `precision/` and `checkpoint/`, whose classes do not derive from Lightning's.
The names of the strategies are registered with a Lightning package when the program imports that package. Packages that
a program does not use are therefore not imported.
"""
