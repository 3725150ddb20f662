"""The connector, in an engine whose daemon dies or hangs at a moment that a test has named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from kvstore_client.integrations.vllm.connector import KVStoreConnector
from tests.engines.vllm.rig import ORDER_VARIABLE


class DyingDaemonConnector(KVStoreConnector):
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            _reach("found")

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        if self._get_connector_metadata().step.loads:  # type: ignore[attr-defined]
            _reach("loading")

    def wait_for_save(self) -> None:
        super().wait_for_save()
        if self._get_connector_metadata().step.stores:  # type: ignore[attr-defined]
            _reach("storing")


def _reach(moment: str) -> None:
    """The order is removed once it is carried out."""
    path = Path(os.environ[ORDER_VARIABLE])
    order = json.loads(path.read_text()) if path.exists() else None
    if order is not None and order["at"] == moment:
        os.kill(order["pid"], order["signal"])
        path.unlink()
