"""Public classes of this package for each of Lightning's import names.

    lightning.pytorch    lightning_pytorch.py    `from lightning_hybrid import HybridAllReduceStrategy`
    pytorch_lightning    pytorch_lightning.py    `from lightning_hybrid.flavours.pytorch_lightning import ...`
    lightning.fabric     fabric.py               `from lightning_hybrid.flavours.fabric import ...`
    lightning_fabric     lightning_fabric.py     `from lightning_hybrid.flavours.lightning_fabric import ...`

The implementations are in `strategy/`, `precision/` and `checkpoint/`, whose classes do not derive from Lightning's
classes. The names of the strategies are registered with a Lightning package when the program imports that package.
Therefore packages that a program does not use are not imported.
"""
