"""Daemon and clients in containers of their own that share one folder and nothing else.

Kind of fault (users' reports): "UID mismatch, hostIPC refused": pods that may not share memory the usual ways.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[2]
USER = 20_011
"""The user of both containers, which nothing else on the machine uses."""

_ISOLATE = """
set -e
mount --make-rprivate /
mount --bind "$SHARED" "$SHARED"
mount -t tmpfs -o size=4k,nr_inodes=2,mode=000 none /dev/shm
mount -o remount,bind,ro /
exec "$@"
"""
"""A mount namespace where the root is read-only, shared memory is shut, and one folder can be written to."""

_NAMESPACES = ("unshare", "--mount", "--ipc", "--pid", "--net", "--uts", "--fork", "--kill-child", "--mount-proc")

_BECOME = f"""
import os
def become():
    os.setgroups([]); os.setgid({USER}); os.setuid({USER})
    assert not os.access("/", os.W_OK) and not os.access("/dev/shm", os.R_OK)
"""
"""What is needed is imported first: that user may have no access to the interpreter."""

_DAEMON = (
    _BECOME
    + """
import sys
import encodings.idna
import structlog, uvloop
import kvstore_server.daemon, kvstore_server.obs.logs
from kvstore_server.cli import serve
become()
serve.main(sys.argv[1:])
"""
)

_CLIENT = (
    _BECOME
    + """
import json, sys
import numpy as np
import encodings.idna
from kvstore.messages import TransferPath
from kvstore_client import Client, ClientConfig
from tests.faults import blocks
become()
address, chain, do = sys.argv[1], int(sys.argv[2]), sys.argv[3]
hashes, space = blocks.chain(chain), blocks.LARGE
right = [blocks.right_bytes(space, one) for one in hashes]
with Client(address, config=ClientConfig(transport="slab")) as client:
    if do == "put":
        states = [state.name for state in client.put(space, hashes, right).states]
    else:
        into = np.zeros((len(hashes), space.block_layout.payload_bytes), dtype=np.uint8)
        states = [state.name for state in client.get(space, hashes, into).states]
        assert all(np.array_equal(row, block) for row, block in zip(into, right)), "wrong bytes"
    with open("/proc/self/maps") as maps:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps if line.split()[1][3] == "s"]
with open("/proc/self/net/dev") as devices:
    networks = [line.split(":")[0].strip() for line in devices if ":" in line]
shared_bytes = sum(end - start for start, end in spans)
print(json.dumps({"states": states, "shared_bytes": shared_bytes, "pid": os.getpid(), "networks": networks}))
"""
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """What the containers share; the user's own."""
    path = Path(tempfile.mkdtemp())
    os.chown(path, USER, USER)
    path.chmod(0o700)
    yield path
    shutil.rmtree(path)


def contained(folder: Path, code: str, *arguments: str) -> list[str]:
    return [*_NAMESPACES, "sh", "-c", _ISOLATE, "sh", sys.executable, "-c", code, *arguments]


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return {**kept, "SHARED": str(folder), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}


def run_client(folder: Path, *arguments: str) -> dict[str, Any]:
    command = contained(folder, _CLIENT, f"unix:{folder}/s", *arguments)
    done = subprocess.run(
        command, check=False, env=environment(folder), cwd="/", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def why_not() -> str | None:
    """Why containers cannot be made here."""
    if os.geteuid() != 0:
        return "only root can make containers with users of their own"
    if shutil.which("unshare") is None:
        return "unshare is not here"
    with tempfile.TemporaryDirectory() as folder:
        command = contained(Path(folder), "")
        done = subprocess.run(
            command, check=False, env=environment(Path(folder)), cwd="/", capture_output=True, text=True
        )
    return f"this machine makes no containers: {done.stderr.strip()}" if done.returncode else None


def test_containers_that_share_one_folder_share_blocks_over_the_slab(folder: Path) -> None:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    ready = folder / "ready.json"
    arguments = ["--memory-capacity", "64MiB", "--grpc-port", "0", "--metrics-port", "0", "--bulk-port", "0"]
    arguments += ["--socket-path", str(folder / "s"), "--ready-file", str(ready), "--log-format", "json"]
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(
            contained(folder, _DAEMON, *arguments), env=environment(folder), cwd="/", stdout=log, stderr=log
        ) as daemon,
    ):
        try:
            deadline_s = time.monotonic() + 30
            while not ready.exists():
                log.seek(0)
                assert daemon.poll() is None, log.read()
                assert time.monotonic() < deadline_s, "the daemon does not start"
                time.sleep(0.02)
            stored = run_client(folder, "1", "put")
            assert set(stored["states"]) == {"STORED"}
            loaded = run_client(folder, "1", "get")
            assert set(loaded["states"]) == {"HIT"}
            for client in (stored, loaded):
                assert client["shared_bytes"] >= 64 << 20, "the blocks went another way"
                assert client["networks"] == ["lo"]
                assert client["pid"] < 10
        finally:
            # The first process in there kills all the others by its end; becoming another user has untied it from us.
            for inside in psutil.Process(daemon.pid).children():
                inside.kill()
            daemon.kill()
