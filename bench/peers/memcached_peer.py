"""memcached, with a client written for the purpose: meta commands, whole batches pipelined."""

from __future__ import annotations

import os
import shutil

from peer import PipelinedPeer, accepts, connect, free_port

from kvstore.errors import UnavailableError

# In use, twice over, and what memcached keeps for itself.
_ROOM = 2.5


class Memcached(PipelinedPeer):
    def start(self) -> None:
        program = shutil.which("memcached")
        if program is None:
            raise UnavailableError("there is no memcached; on Debian and Ubuntu: apt-get install memcached")
        path, port = self.folder / "memcached.sock", free_port()
        kept_bytes = self.spec.batch_count * self.spec.block_count * self.spec.block_bytes
        is_tcp = self.spec.network == "tcp"
        command = [
            program,
            *(("-l", "127.0.0.1", "-p", str(port)) if is_tcp else ("-s", str(path))),
            "-t",
            "2",
            "-m",
            str(64 + int(kept_bytes * _ROOM) // (1 << 20)),
        ]
        command += ["-I", str(max(self.spec.block_bytes * 2, 1 << 20))]
        command += ["-u", "root"] if os.getuid() == 0 else []
        self.start_server(command, is_ready=(lambda: accepts(port)) if is_tcp else path.exists)
        size = self.spec.block_bytes
        self.converse(
            connect(port if is_tcp else path),
            put_head=lambda key: b"ms %b %d\r\n" % (key, size),
            get_command=lambda key: b"mg %b v\r\n" % key,
            get_head=b"VA %d\r\n" % size,
            stored=b"HD\r\n",
        )
