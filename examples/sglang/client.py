"""Questions about one document, and where the document's pages came from.

examples/sglang/serve.sh MODEL                  # in another terminal
python examples/sglang/client.py DOCUMENT       # again after a restart of SGLang: from the store
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

QUESTIONS = ("What is this about?", "Who wrote it?", "What may I do with it?")
TOKEN_COUNT = 32


def ask(address: str, text: str) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": TOKEN_COUNT}
    request = urllib.request.Request(
        f"{address}/generate",
        data=json.dumps({"text": text, "sampling_params": sampling}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: client.py DOCUMENT [http://HOST:PORT]")
    document = Path(sys.argv[1]).read_text(encoding="utf-8")
    address = sys.argv[2] if len(sys.argv) == 3 else "http://127.0.0.1:30000"
    for question in QUESTIONS:
        started_s = time.monotonic()
        try:
            told = ask(address, f"{document}\n\nQuestion: {question}\nAnswer:")["meta_info"]
        except urllib.error.URLError as error:
            sys.exit(f"no answer from {address}: {error.reason}")
        took_s = time.monotonic() - started_s
        places = told.get("cached_tokens_details") or {"device": told["cached_tokens"], "host": 0, "storage": 0}
        print(
            f"{question} {told['prompt_tokens']} tokens, {told['cached_tokens']} of them not computed "
            f"(device {places['device']}, host {places['host']}, store {places['storage']}), {took_s:.2f} s"
        )


if __name__ == "__main__":
    main()
