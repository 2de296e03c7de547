"""Number types of the wire."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

TOKEN = np.dtype("<i4")
PROB = np.dtype("<f4")
TOKEN_MAX = int(np.iinfo(TOKEN).max)

# What a damaged message could otherwise turn into a huge allocation or an index out of range.
Count = Annotated[int, msgspec.Meta(ge=0, le=TOKEN_MAX)]
