"""One peer as a subject of measurement: `python bench/peers/worker.py SPEC`, a JSON object."""

from __future__ import annotations

import json
import sys

from lmcache_peer import LMCache
from memcached_peer import Memcached
from mooncake_peer import Mooncake
from peer import Peer, PeerSpec
from redis_peers import RedisPy, RedisRaw

from kvstore_client.bench.subject import serve

PEERS: dict[str, type[Peer]] = {
    "redis_raw": RedisRaw,
    "redis_py": RedisPy,
    "memcached": Memcached,
    "mooncake": Mooncake,
    "lmcache": LMCache,
}

if __name__ == "__main__":
    spec = PeerSpec(**json.loads(sys.argv[1]))
    serve(lambda: PEERS[spec.peer](spec))
