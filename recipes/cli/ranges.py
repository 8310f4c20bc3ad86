"""Types of numbers with a range, for keys of configurations and fields of dataclasses. No import of Hydra."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

Count = Annotated[int, Field(gt=0)]
CountOrZero = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Ranks = Literal[-1] | Annotated[int, Field(gt=0, le=10**6)]  # -1: all
Seed = Annotated[int, Field(ge=0, lt=2**32)]
