"""Online filtering: which groups a step keeps (DAPO's dynamic sampling, 2503.14476)."""

from __future__ import annotations

import math
from collections.abc import Sequence


def keep_group(values: Sequence[float], low: float, high: float) -> tuple[bool, str]:
    """Whether a group of these values is kept, and otherwise why not: kept where low < mean < high.

    Reasons: `too_low`, `too_high`, `not_finite`, `empty`.
    """
    if not values:
        return False, "empty"
    if not all(math.isfinite(v) for v in values):
        return False, "not_finite"
    # Equal values are their own mean: rounding must not carry a group of bounds over the bound.
    mean = values[0] if min(values) == max(values) else math.fsum(values) / len(values)
    if mean <= low:
        return False, "too_low"
    if mean >= high:
        return False, "too_high"
    return True, ""
