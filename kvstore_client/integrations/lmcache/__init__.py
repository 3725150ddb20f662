"""LMCache: its remote storage plug-in (`connector`), and the L2 adapter of its multi-process server (`l2`).

`identity` tells LMCache's keys and objects as our namespaces and hashes, and imports nothing of LMCache.
"""

from __future__ import annotations
