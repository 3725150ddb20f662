"""The environment that makes gRPC streams fast: what it says, and that it does what it is for."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from kvstore_client.start_environment import start_environment

PAGES = 16 * (2 << 20) // 4096
"""Of one batch."""

COUNT_FAULTS = """
import resource
def batch():
    return [b"x" * (2 << 20) for _ in range(16)]
for _ in range(3):
    batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    batch()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 10)
"""


def test_what_is_set_already_stays() -> None:
    given = {"PATH": "/bin", "GRPC_EXPERIMENTS": "mine", "MALLOC_TRIM_THRESHOLD_": "1"}
    environment = start_environment(given)
    assert {name: environment[name] for name in given} == given
    assert set(environment) - set(given) == {"MALLOC_MMAP_THRESHOLD_"}


def test_it_is_the_environment_of_this_process_which_stays_as_it_is() -> None:
    before = dict(os.environ)
    environment = start_environment()
    assert before.items() <= environment.items()
    assert dict(os.environ) == before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the allocator's settings are glibc's")
def test_a_process_that_starts_with_it_takes_no_pages_from_the_kernel_for_each_batch() -> None:
    def faults_per_batch(environment: dict[str, str]) -> int:
        command = [sys.executable, "-c", COUNT_FAULTS]
        return int(subprocess.run(command, env=environment, capture_output=True, check=True, text=True).stdout)

    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    assert faults_per_batch(plain) > PAGES // 2
    assert faults_per_batch(start_environment(plain)) < PAGES // 100
