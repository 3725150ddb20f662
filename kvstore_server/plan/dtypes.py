"""Names of element types, as engines and configurations spell them."""

from __future__ import annotations

from kvstore.errors import InvalidArgumentError
from kvstore.layout import DTYPE_BYTES

_SHORT = {
    "fp32": "float32",
    "float": "float32",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}


def parse_dtype(text: str, *, field: str) -> str:
    """One of the layout's names; raises `InvalidArgumentError` naming `field`."""
    name = text.strip().lower().removeprefix("torch.")
    name = _SHORT.get(name, name)
    if name not in DTYPE_BYTES:
        raise InvalidArgumentError.of(field, text, ", ".join([*DTYPE_BYTES, *_SHORT]))
    return name


def element_bytes(dtype: str) -> int:
    return DTYPE_BYTES[dtype]
