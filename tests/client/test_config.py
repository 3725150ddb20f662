"""Settings are checked when they are made, and their defaults are consistent."""

from __future__ import annotations

import pytest

from kvstore_client import ClientConfig
from tests.client.builders import refuses


def test_defaults_need_nothing_and_bound_what_a_hang_can_cost() -> None:
    config = ClientConfig()
    assert config.data_timeout_s(config.batch_bytes_max) <= 5.0
    assert config.reservation_s > 2 * config.data_timeout_s(config.batch_bytes_max)


@pytest.mark.parametrize("name", sorted(set(ClientConfig.__dataclass_fields__) - {"transport"}))
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_nothing_may_be_zero_negative_or_endless(name: str, value: float) -> None:
    with refuses(name):
        ClientConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("batch_count_max", 65_537), ("lease_s", 601.0), ("reservation_s", 301.0)])
def test_limits_of_the_contract_hold(name: str, value: float) -> None:
    with refuses(name):
        ClientConfig(**{name: value})  # type: ignore[arg-type]


def test_a_cooldown_cannot_shrink() -> None:
    with refuses("breaker_cooldown_max_s"):
        ClientConfig(breaker_cooldown_initial_s=2.0, breaker_cooldown_max_s=1.0)


def test_only_known_transports_are_taken() -> None:
    with refuses("transport"):
        ClientConfig(transport="rdma")
