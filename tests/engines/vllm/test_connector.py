"""The connector beside others, in one list: what vLLM hands it then is not always its own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

base = pytest.importorskip(
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    reason="vLLM is not installed: make vllm-env",
    exc_type=ImportError,
)

from kvstore_client.integrations.vllm import KVStoreConnector  # noqa: E402

pytestmark = pytest.mark.vllm


@pytest.fixture
def connector() -> Any:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={}, kv_load_failure_policy="recompute"),
        cache_config=SimpleNamespace(),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1),
        model_config=SimpleNamespace(is_encoder_decoder=False),
    )
    return KVStoreConnector(config, base.KVConnectorRole.SCHEDULER, SimpleNamespace(kv_cache_groups=[]))


def test_the_handshake_of_another_connector_switches_it_off_and_stops_no_engine(
    connector: Any, caplog: pytest.LogCaptureFixture
) -> None:
    connector.set_xfer_handshake_metadata_pp_aware({(0, 0): base.KVConnectorHandshakeMetadata()})
    assert connector.get_num_new_matched_tokens(SimpleNamespace(), 0) == (0, False)
    assert not connector.build_connector_meta(SimpleNamespace()).step.stores
    assert not connector.has_pending_push_work()


def test_a_request_that_ends_beside_connectors_of_one_group_ends_here_too(connector: Any) -> None:
    ended = []
    connector._scheduler = SimpleNamespace(finish_request=lambda request, block_ids: ended.append((request, block_ids)))
    assert connector.request_finished("request", [1, 2]) == (False, None)
    assert ended == [("request", ([1, 2],))]
