"""What `kv_connector_extra_config` may say."""

from __future__ import annotations

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore_client.integrations.vllm.settings import ConnectorSettings


def test_nothing_has_to_be_said() -> None:
    assert ConnectorSettings.parse(None, where="kv_connector_extra_config").address is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lookup_timeout_s", 0),
        ("lookup_timeout_s", 61),
        ("pending_wait_s", -1),
        ("store_share_max", 0),
        ("store_share_max", 1.5),
        ("lookup_timeout_s", "soon"),
        ("no_such_setting", 1),
    ],
)
def test_a_value_that_makes_no_sense_is_named(field: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        ConnectorSettings.parse({field: value}, where="kv_connector_extra_config")
    assert f"kv_connector_extra_config.{field}" in str(caught.value)
    assert str(value) in str(caught.value)
