"""Two clients with one system prompt: the second waits for its own question only, on whichever engine it asks.

examples/vllm/serve.sh MODEL                                                            # in another terminal
python examples/vllm/two_clients.py DOCUMENT                                            # both ask this engine
python examples/vllm/two_clients.py DOCUMENT http://127.0.0.1:8000 http://127.0.0.1:8001    # each its own

Start it again after a restart of vLLM: then the first client does not wait either.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

QUESTIONS = {"Ada": "What is this about?", "Ben": "What may I do with it?"}
TOKEN_COUNT = 16


def events(address: str, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    request = urllib.request.Request(
        f"{address}{path}", data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        for line in response:
            data = line.decode().strip().removeprefix("data: ")
            if data and data != "[DONE]":
                yield json.loads(data)


def ask(address: str, prompt: str) -> tuple[float, dict[str, Any]]:
    """Seconds until the first token, and what the engine says it has used."""
    with urllib.request.urlopen(f"{address}/v1/models", timeout=60) as response:
        model = json.load(response)["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": TOKEN_COUNT, "temperature": 0.0}
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    started_s = time.monotonic()
    first_token_s = None
    usage: dict[str, Any] = {}
    for event in events(address, "/v1/completions", body | streamed):
        if event["choices"] and first_token_s is None:
            first_token_s = time.monotonic() - started_s
        usage = event.get("usage") or usage
    assert first_token_s is not None, "the engine has answered nothing"
    return first_token_s, usage


def loaded_tokens(address: str) -> int:
    """Prompt tokens that this engine has had from the store so far."""
    with urllib.request.urlopen(f"{address}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    return round(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:kvstore_load_tokens_total{")))


def main() -> None:
    if not 2 <= len(sys.argv) <= 4:
        sys.exit("usage: two_clients.py DOCUMENT [http://HOST:PORT [http://HOST:PORT]]")
    document = Path(sys.argv[1]).read_text(encoding="utf-8")
    addresses = sys.argv[2:] or ["http://127.0.0.1:8000"]
    for number, (client, question) in enumerate(QUESTIONS.items()):
        address = addresses[number % len(addresses)]
        before = loaded_tokens(address)
        first_token_s, usage = ask(address, f"{document}\n\nQuestion: {question}\nAnswer:")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        print(
            f"{client} on {address}: first token after {first_token_s:.2f} s; of {usage['prompt_tokens']} tokens "
            f"{cached} were not computed, {loaded_tokens(address) - before} of them came from the store"
        )


if __name__ == "__main__":
    main()
