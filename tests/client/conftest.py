"""Both clients, against a daemon in this process that can be told to misbehave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kvstore_client import ClientConfig
from tests.client.adapters import CLIENTS, AnyClient, BlockingAsyncClient
from tests.client.builders import FAST
from tests.client.fake_daemon import FakeDaemon

Connect = Callable[..., AnyClient]


@pytest.fixture
def fake() -> Iterator[FakeDaemon]:
    daemon = FakeDaemon()
    yield daemon
    daemon.close()


@pytest.fixture(params=list(CLIENTS))
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes clients of one kind; closes them after the test."""
    with ExitStack() as stack:

        def make(address: str | None = None, *, config: ClientConfig = FAST) -> AnyClient:
            client = CLIENTS[request.param](address, config=config)
            if isinstance(client, BlockingAsyncClient):
                stack.callback(client.close_loop)
            stack.callback(client.close)
            return client

        yield make
