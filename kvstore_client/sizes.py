"""Sizes as people write them; one grammar for every flag, variable and file."""

from __future__ import annotations

import re
from decimal import Decimal

from kvstore.errors import InvalidArgumentError

SIZE_ALLOWED = "a size such as 512MiB, 8GiB, 8Gi or 1000000"
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgtp])(i?))?b?", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_size(text: str, *, field: str) -> int:
    """Bytes, rounded down: `8GiB` and Kubernetes' `8Gi` are 8 * 1024**3, `8GB` and `8G` are 8 * 1000**3.

    Anything else raises `InvalidArgumentError` naming `field`.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise InvalidArgumentError.of(field, text, SIZE_ALLOWED)
    number, unit, binary = match.groups(default="")
    return int(Decimal(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])


def format_size(size_bytes: int) -> str:
    """For people: `1.5GiB`; bytes below 1 KiB are exact."""
    size, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size_bytes}B" if unit == "B" else f"{size:.1f}{unit}"
