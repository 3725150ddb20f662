"""The process that serves arenas to NIXL: `python -m kvstore_server.rpc.nixl_worker ARENA_BYTES DESCRIPTOR...`.

Once it serves it writes its metadata to stdout, behind its length in 4 bytes, little-endian. It ends with its stdin, so
also with the daemon.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys

import numpy as np

from kvstore.errors import UnavailableError
from kvstore_client.paths.nixl import ServedMemory

LENGTH_BYTES = 4


def main(arena_bytes: int, descriptors: list[int]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the daemon, too, which ends us when it is done
    # The vendor's libraries write to stdout what belongs into the log.
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    maps = [mmap.mmap(descriptor, arena_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) for descriptor in descriptors]
    try:
        served = ServedMemory(
            [int(np.frombuffer(arena, dtype=np.uint8).ctypes.data) for arena in maps], arena_bytes=arena_bytes
        )
    except UnavailableError as error:
        sys.exit(str(error))
    with os.fdopen(answer, "wb") as out:
        out.write(len(served.metadata).to_bytes(LENGTH_BYTES, "little") + served.metadata)
    sys.stdin.buffer.read()
    # Not by way of the interpreter's end, which the vendor's libraries do not always survive.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), [int(argument) for argument in sys.argv[2:]])
