"""Whatever becomes of the daemon, the engine gives the tokens that it gives without one, and is warm again afterwards.

Kinds of fault (users' reports): "large retrieve hangs silently", "engine never re-registered", "unloaded buffers
counted as loaded".
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import DaemonProcess

from .rig import BLOCK_TOKENS, ORDER_VARIABLE, Engine, Prompt, connect, probe_prompt

_PROMPT = Prompt.random(48 * BLOCK_TOKENS + 1, seed=7)
"""Takes several batches to load."""
_FAULTS = (
    ("found", signal.SIGSTOP),
    ("loading", signal.SIGKILL),
    ("loading", signal.SIGSTOP),
    ("storing", signal.SIGKILL),
)
"""What becomes of the daemon right after the engine has done that."""


@pytest.mark.parametrize(
    ("model_name", "transport"), [("tiny-llama", "slab"), ("tiny-llama", "bulk"), ("tiny-hybrid", "grpc")]
)
def test_a_daemon_that_dies_or_hangs_at_a_bad_moment_costs_a_computation(
    model_name: str,
    transport: str,
    models: dict[str, Path],
    start_engine: Callable[..., Engine],
    daemon: DaemonProcess,
    tmp_path: Path,
) -> None:
    order_path = tmp_path / "order.json"
    flag = connect(daemon.unix_address if transport == "slab" else daemon.address, transport=transport)
    flag |= {"kv_connector": "DyingDaemonConnector", "kv_connector_module_path": "tests.engines.vllm.dying_daemon"}
    engine = start_engine(models[model_name], kv_transfer_config=flag, environment={ORDER_VARIABLE: str(order_path)})
    [computed] = engine.ask_afresh(_PROMPT)
    assert computed.cached_count == 0
    assert computed.margin > 1e-3, "last bits decide: take another prompt"
    for moment, number in _FAULTS:
        said = f"{number.name} when {moment}"
        engine.wait_warm(probe_prompt())
        if moment != "storing":
            engine.ask_afresh(_PROMPT)
        order_path.write_text(json.dumps({"at": moment, "pid": daemon.pid, "signal": number}))
        [answer] = engine.ask_afresh(_PROMPT)
        assert not order_path.exists(), f"the moment did not come: {said}"
        assert answer.token_ids == computed.token_ids, said
        [answer] = engine.ask_afresh(_PROMPT)
        assert answer.token_ids == computed.token_ids, f"after {said}"
        assert answer.cached_count == 0, f"after {said}"
        if number is signal.SIGKILL:
            daemon.kill()
            daemon.start()
        else:
            # Without what was stored: the next moment is to find the store empty.
            daemon.resume()
            daemon.restart()


def test_an_engine_starts_and_answers_without_a_daemon_and_is_warm_once_there_is_one(
    models: dict[str, Path],
    start_engine: Callable[..., Engine],
    start_daemon: Callable[..., DaemonProcess],
    tmp_path: Path,
) -> None:
    socket_path = tmp_path / "late.sock"
    engine = start_engine(models["tiny-llama"], kv_transfer_config=connect(f"unix:{socket_path}"))
    [computed] = engine.ask_afresh(_PROMPT)
    assert computed.cached_count == 0
    daemon = start_daemon("--socket-path", str(socket_path))
    engine.wait_warm(probe_prompt())
    first, second = engine.ask_afresh(_PROMPT, _PROMPT)
    daemon.kill()
    assert first.token_ids == second.token_ids == computed.token_ids
    assert (first.cached_count, second.cached_count) == (0, _PROMPT.whole_count)
