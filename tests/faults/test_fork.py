"""A process that forks in mid-use, and one that has no descriptors left: every call ends, and nothing is raised."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import DaemonProcess

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, *arguments: str) -> str:
    """What a program of its own prints; one that hangs fails."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


FORKING = """
    import os, signal, sys, threading, time
    from kvstore_client import Client
    from tests.client.builders import chain, namespace, payloads

    address, daemon_pid, operation = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    space, hashes, memory = namespace(model="fork"), chain(2), bytearray(512)
    client = Client(address)
    act = {
        "get": lambda: client.get(space, hashes, memory),
        "put": lambda: client.put(space, hashes, payloads(space, 2)),
    }[operation]
    if operation == "put":
        client.lookup(space, hashes)  # attached for reading, so that only the put attaches for writing
    os.kill(daemon_pid, signal.SIGSTOP)
    busy = threading.Thread(target=act)
    busy.start()
    time.sleep(0.3)  # in the middle of attaching, which the stopped daemon does not answer
    child = os.fork()
    os.kill(daemon_pid, signal.SIGCONT)
    if child == 0:
        signal.alarm(20)
        for _ in range(50):
            result = client.put(space, hashes, payloads(space, 2))
            if result.error is None:
                os._exit(0)
            time.sleep(0.1)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    busy.join()
    print(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("operation", ["get", "put"])
def test_a_child_that_is_forked_while_a_thread_attaches_goes_on_by_itself(
    daemon: DaemonProcess, operation: str
) -> None:
    assert run(FORKING, daemon.unix_address, str(daemon.pid), operation) == "0\n"


EXHAUSTED = """
    import os, resource, sys
    from kvstore_client import Client, ClientConfig
    from tests.client.builders import chain, namespace, payloads

    address, transport = sys.argv[1:]
    space, hashes = namespace(model="few"), chain(2)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    client = Client(address, config=ClientConfig(transport=transport))
    held = []
    try:
        while True:
            held.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        pass
    assert client.lookup(space, hashes).error is not None
    assert client.get(space, hashes, bytearray(512)).error is not None
    assert client.put(space, hashes, payloads(space, 2)).error is not None
    assert client.view(space, hashes).error is not None
    assert client.acquire(space, hashes).error is not None
    for descriptor in held:
        os.close(descriptor)
    import time
    for _ in range(80):
        if client.put(space, hashes, payloads(space, 2)).error is None:
            print("well again")
            break
        time.sleep(0.1)
"""


@pytest.mark.parametrize("transport", ["auto", "slab", "grpc"])
def test_without_descriptors_calls_miss_and_are_well_again_later(daemon: DaemonProcess, transport: str) -> None:
    assert run(EXHAUSTED, daemon.unix_address, transport) == "well again\n"
