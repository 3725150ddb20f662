"""What the daemon asks of the C library. (Memory limits are tested with the configuration.)"""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from tests.client.test_start_environment import COUNT_FAULTS, PAGES

KEEP = """
from kvstore_server.machine import keep_freed_memory
assert keep_freed_memory(request_bytes_max=32 << 20, kept_bytes=64 << 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt(3) is glibc's")
def test_freed_memory_is_used_again_without_asking_the_kernel() -> None:
    command = [sys.executable, "-c", KEEP + COUNT_FAULTS]
    assert int(subprocess.run(command, capture_output=True, check=True, text=True).stdout) < PAGES // 100
