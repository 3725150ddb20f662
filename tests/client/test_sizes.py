"""Sizes as people write them."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore_client.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1000000", 1_000_000),
        ("0", 0),
        ("512MiB", 512 << 20),
        (" 8 gib ", 8 << 30),
        ("8Gi", 8 << 30),
        ("8GB", 8 * 1000**3),
        ("8G", 8 * 1000**3),
        ("1.5KiB", 1536),
        ("0.3MB", 300_000),
        ("7b", 7),
        ("2PiB", 2 << 50),
    ],
)
def test_a_size_is_read_as_written(text: str, size_bytes: int) -> None:
    assert parse_size(text, field="--size") == size_bytes


@pytest.mark.parametrize("text", ["", "12 apples", "-1", "1e9", "GiB", "1i", "1iB", "1.GiB", "1 2MiB", "nan", "٣MiB"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"--size is .*; allowed: a size such as 512MiB"):
        parse_size(text, field="--size")
