"""What a client decides, as generators without I/O; `client` and `aio` carry their steps out.

Flows that serve lookups, loads and stores never raise an operating error: it ends up in the result, beside
misses. A flow is for one use; what the calls of a client share is in its `Scope`.
"""
