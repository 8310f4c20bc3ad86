"""Classes of this package for each import name of Lightning, and their names in Lightning's registries.

    lightning.pytorch    lightning_pytorch.py    `from lightning_hybrid import HybridAllReduceStrategy`
    pytorch_lightning    pytorch_lightning.py    `from lightning_hybrid.flavours.pytorch_lightning import ...`
    lightning.fabric     fabric.py               `from lightning_hybrid.flavours.fabric import ...`
    lightning_fabric     lightning_fabric.py     `from lightning_hybrid.flavours.lightning_fabric import ...`

The implementations are in `strategy/`, `precision/` and `checkpoint/`, whose classes do not derive from Lightning's.
A Lightning package gets the names when the program imports it, so only packages that a program uses are imported.
"""
