"""Number types with a range, for configuration keys and dataclass fields.

This module does not import Hydra.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Count = Annotated[int, Field(gt=0)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ranks = Literal[-1] | Annotated[int, Field(gt=0, le=10**6)]  # -1: all devices
Seed = Annotated[int, Field(ge=0, lt=2**32)]
