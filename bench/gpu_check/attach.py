"""Another process opens the pool, finds in it what was written, and writes into it.

python -m bench.gpu_check.attach       what the other process runs; it is told of the pool on its standard input
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.gpu_check.rig import Result, Rig
from gpu_agent.device import PoolHandle, open_device, open_pool
from kvstore.errors import KvstoreError

_WAIT_S = 90
_READ_ROW, _WRITTEN_ROW, _SLOT_COUNT = 1, 2, 4


def check_attach(rig: Rig) -> Iterator[Result]:
    device = open_device(rig.device.name, shares_pools=True)
    try:
        pool = device.allocate_pool(slot_count=_SLOT_COUNT, block_bytes=rig.sizes.block_bytes)
        pool.copy_(rig.noise(_SLOT_COUNT))
        rig.synchronise()
        handle = device.share_pool(pool)
    except KvstoreError as error:
        device.close()
        yield Result(name="attach", passed=None, skipped=str(error))
        return
    expected = pool.cpu()
    expected[_WRITTEN_ROW] = expected[_READ_ROW].flip(0)
    said = _ask_other(handle, expected_digest=_digest(pool[_READ_ROW]))
    rig.synchronise()
    is_pool_right = torch.equal(pool.cpu(), expected)
    device.close()
    yield Result(
        name="attach", passed=said == "" and is_pool_right, figures={"said": said, "is_pool_right": is_pool_right}
    )


def _ask_other(handle: PoolHandle, *, expected_digest: str) -> str:
    """Why it did not work; nothing when it did."""
    request = {
        "slot_count": handle.slot_count,
        "block_bytes": handle.block_bytes,
        "descriptor": handle.descriptor,
        "device_uuid": handle.device_uuid,
        "ipc_handle": handle.ipc_handle.hex(),
        "expected_digest": expected_digest,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=_WAIT_S,
            pass_fds=() if handle.descriptor is None else (handle.descriptor,),
            check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_WAIT_S} s"
    return "" if done.returncode == 0 else f"status {done.returncode}: {done.stderr.strip()[-500:]}"


def _answer() -> int:
    request = json.load(sys.stdin)
    handle = PoolHandle(
        slot_count=request["slot_count"],
        block_bytes=request["block_bytes"],
        descriptor=request["descriptor"],
        device_uuid=request["device_uuid"],
        ipc_handle=bytes.fromhex(request["ipc_handle"]),
    )
    pool = open_pool(handle)
    if _digest(pool[_READ_ROW]) != request["expected_digest"]:
        sys.stderr.write("the pool's bytes are others here")
        return 1
    pool[_WRITTEN_ROW] = pool[_READ_ROW].flip(0)
    if pool.is_cuda:
        torch.cuda.synchronize(pool.device)
    return 0


def _digest(row: Tensor) -> str:
    return hashlib.sha256(row.cpu().numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(_answer())
