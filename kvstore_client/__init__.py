"""Client library of the KV-cache store: look prefixes up, load and store blocks.

`Client()` and `AsyncClient()` find the node's daemon by themselves. Importing this package loads neither torch nor
the daemon.
"""

from __future__ import annotations

from kvstore.messages import FinishReason
from kvstore_client.aio import AsyncClient, AsyncLease
from kvstore_client.client import Client, Lease
from kvstore_client.config import ClientConfig
from kvstore_client.hints import Hint
from kvstore_client.reserved import Reserved
from kvstore_client.results import GetResult, LookupResult, PrefetchResult, PutResult, PutState
from kvstore_client.views import AsyncViews, BlockView, Views

__all__ = [
    "AsyncClient",
    "AsyncLease",
    "AsyncViews",
    "BlockView",
    "Client",
    "ClientConfig",
    "FinishReason",
    "GetResult",
    "Hint",
    "Lease",
    "LookupResult",
    "PrefetchResult",
    "PutResult",
    "PutState",
    "Reserved",
    "Views",
]
