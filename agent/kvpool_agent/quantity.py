"""Memory quantities as Kubernetes writes them.

Invariant: a quantity that parses is a positive whole number of bytes.
"""

from __future__ import annotations

import re

_QUANTITY = re.compile(r"([1-9][0-9]{0,8})(Mi|Gi|Ti)")
_UNITS = {"Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def parse_quantity(text: str) -> int | None:
    """Bytes of "64Mi", "1Gi", "2Ti"; None when it is not one of them."""
    match = _QUANTITY.fullmatch(text)
    return int(match[1]) * _UNITS[match[2]] if match else None
