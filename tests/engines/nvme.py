"""Damage to what a daemon has on disk."""

from __future__ import annotations

import struct
from pathlib import Path


def damage_every_seventh(nvme_path: Path) -> int:
    """Turns bits around in the payload of every seventh block of the segments (docs/formats/nvme_segment.md)."""
    seen_count = damaged_count = 0
    for path in sorted(nvme_path.glob("segments/*.seg")):
        with path.open("r+b") as file:
            header = file.read(4096)
            (slot_bytes,) = struct.unpack_from("<Q", header, 40)
            if header[:4] != b"KVNS" or slot_bytes == 0:
                continue
            for start in range(4096, path.stat().st_size - slot_bytes + 1, slot_bytes):
                file.seek(start)
                slot = file.read(64)
                if slot[:4] != b"KVNB":
                    continue
                (stored_bytes,) = struct.unpack_from("<Q", slot, 16)
                if seen_count % 7 == 3:
                    place = start + 64 + 128 + (stored_bytes - 128) // 2
                    file.seek(place)
                    [byte] = file.read(1)
                    file.seek(place)
                    file.write(bytes([byte ^ 0xFF]))
                    damaged_count += 1
                seen_count += 1
    return damaged_count
