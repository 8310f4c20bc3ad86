"""Our classes for each of Lightning's packages, and their names in its registries.

    lightning.pytorch    lightning_pytorch.py    `from lightning_hybrid import HybridAllReduceStrategy`
    pytorch_lightning    pytorch_lightning.py    `from lightning_hybrid.flavours.pytorch_lightning import ...`
    lightning.fabric     fabric.py               `from lightning_hybrid.flavours.fabric import ...`
    lightning_fabric     lightning_fabric.py     `from lightning_hybrid.flavours.lightning_fabric import ...`

What they do stands in `strategy/`, `precision/` and `checkpoint/`, which derive from no Lightning. A package that is
imported later gets the names then: nothing is imported here that a program does not use.
"""
