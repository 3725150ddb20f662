"""The attach socket of an agent: who says what to get an agent's pool mapped.

Format: docs/formats/agent_attach.md. All integers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kvstore.errors import ProtocolError
from kvstore.keys import HASH_BYTES, NamespaceId
from kvstore.messages import OwnerId

ATTACH_VERSION = 1
ATTACH_SOCKET_SUFFIX = ".attach"
"""The attach socket is beside the gRPC socket: its path and this."""
ATTACH_GOODBYE = b"\0"
"""The last byte of an engine that closes its connection while it lives: nothing of it copies any more."""
REFUSAL_BYTES_MAX = 1024

_HELLO_MAGIC = b"KVAH"
_WELCOME_MAGIC = b"KVAW"
_HELLO = struct.Struct(f"<4sHxx16s{HASH_BYTES}s")
_WELCOME = struct.Struct("<4sHHQ")

ATTACH_HELLO_BYTES = _HELLO.size
ATTACH_WELCOME_BYTES = _WELCOME.size


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachHello:
    """First bytes of an engine. It has chosen the session's id, and nobody can guess it."""

    session_id: OwnerId
    namespace_id: NamespaceId

    def encode(self) -> bytes:
        return _HELLO.pack(_HELLO_MAGIC, ATTACH_VERSION, self.session_id, self.namespace_id)

    @classmethod
    def decode(cls, data: bytes) -> AttachHello:
        magic, version, session_id, namespace_id = _HELLO.unpack(data)
        _check(magic, version, expected=_HELLO_MAGIC)
        return cls(session_id=OwnerId(session_id), namespace_id=NamespaceId(namespace_id))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachWelcome:
    """The answer; the descriptors of the session's word and of the pool come with its first byte."""

    refusal_bytes: int = 0
    """Not 0: so many bytes of text follow, the engine is not attached, and no descriptors come."""
    pool_bytes: int = 0
    """0: the pool is on a GPU, and only the word's descriptor comes."""

    def encode(self) -> bytes:
        return _WELCOME.pack(_WELCOME_MAGIC, ATTACH_VERSION, self.refusal_bytes, self.pool_bytes)

    @classmethod
    def decode(cls, data: bytes) -> AttachWelcome:
        magic, version, refusal_bytes, pool_bytes = _WELCOME.unpack(data)
        _check(magic, version, expected=_WELCOME_MAGIC)
        if refusal_bytes > REFUSAL_BYTES_MAX:
            raise ProtocolError(f"a refusal of {refusal_bytes} bytes; allowed: {REFUSAL_BYTES_MAX}")
        return cls(refusal_bytes=refusal_bytes, pool_bytes=pool_bytes)


def _check(magic: bytes, version: int, *, expected: bytes) -> None:
    if magic != expected:
        raise ProtocolError(f"{magic!r} where {expected!r} was expected: not an agent's attach socket")
    if version != ATTACH_VERSION:
        raise ProtocolError(f"attach version {version}; this side speaks {ATTACH_VERSION}")
