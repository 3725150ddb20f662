"""Sizes as people write them."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore_client.sizes import format_size, parse_size


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


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0B"), (1023, "1023B"), (4096, "4.0KiB"), (3 << 29, "1.5GiB"), (1 << 50, "1.0PiB"), (1 << 60, "1024.0PiB")],
)
def test_sizes_are_shown_as_people_write_them(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text
    assert parse_size(text, field="--size") == size_bytes
