"""The contract between engines, clients, daemons and agents: keys, layouts, formats, messages.

Everything here is pure (no I/O, no clock, no randomness) except `wire`, which knows protobuf.
"""

from __future__ import annotations

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Wire version of `kvstore.v1`; raised when an old peer could misread a new message."""
