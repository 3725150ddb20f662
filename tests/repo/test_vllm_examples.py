from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "vllm"
METRICS = """\
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
vllm:prompt_tokens_total{engine="0",model_name="m"} 300.0
vllm:prompt_tokens_total{engine="1",model_name="m"} 100.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 40.0
vllm:kvstore_load_tokens_total{engine="0",model_name="m"} 200.0
vllm:kvstore_saved_seconds_total{engine="0",model_name="m"} 12.5
kvstore_store_capacity_bytes{tier="memory"} 2147483648.0
kvstore_store_used_bytes{tier="memory"} 1073741824.0
kvstore_store_blocks{tier="memory"} 7.0
"""


class Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS.encode())

    def log_message(self, *_: object) -> None:
        """A test says nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_dashboard_tells_hit_rates_over_all_engines_and_what_the_daemon_holds(address: str) -> None:
    command = [sys.executable, str(FOLDER / "dashboard.py"), "--once", address, address]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    rows = {line[:23].strip(): line[23:].split() for line in said.splitlines() if line}
    assert rows["prompt tokens"][0] == "400"
    assert rows["the engine's own"] == ["40", "10.0%"]
    assert rows["from the store"] == ["200", "50.0%"]
    assert rows["seconds saved"][0] == "12.5"
    assert "memory   1.00 GiB of 2.00 GiB  50.0%, 7 blocks" in said
    assert "nvme" not in said


@pytest.mark.parametrize("name", ["two_clients.py", "serve.sh"])
def test_the_programs_say_how_they_are_used(name: str) -> None:
    runner = [sys.executable] if name.endswith(".py") else ["sh"]
    answer = subprocess.run([*runner, str(FOLDER / name)], capture_output=True, text=True, check=False)
    assert answer.returncode == 1
    assert "usage: " in answer.stderr


def test_the_flag_is_the_one_that_the_page_names() -> None:
    flag = json.loads((FOLDER / "kvstore.json").read_text())
    page = (FOLDER.parents[1] / "docs" / "engines" / "vllm.md").read_text()
    told = page.split("--kv-transfer-config '", 1)[1].split("'", 1)[0]
    assert json.loads(told) == flag
