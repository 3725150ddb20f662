"""SGLang, told what to do by lines of JSON on stdin, and answering likewise; all else that it says goes to stderr.

The first job is `start`, with the arguments of `sglang.Engine`.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any


class Worker:
    def __init__(self) -> None:
        self._engine: Any = None

    def start(self, *, settings: dict[str, Any]) -> dict[str, Any]:
        from sglang import Engine

        self._engine = Engine(**settings)
        return {"page_tokens": self._engine.tokenizer_manager.server_args.page_size}

    def generate(self, *, prompts: list[dict[str, Any]], token_count: int) -> list[dict[str, Any]]:
        """All prompts at once, greedy, always `token_count` tokens each."""
        replies = self._engine.generate(
            input_ids=[prompt["token_ids"] for prompt in prompts],
            sampling_params={"temperature": 0.0, "max_new_tokens": token_count, "ignore_eos": True},
            return_logprob=True,
            lora_path=[prompt.get("lora") for prompt in prompts]
            if any("lora" in prompt for prompt in prompts)
            else None,
        )
        return [_answer(reply) for reply in replies]

    def forget(self) -> bool:
        """Drops what the engine has on its device and in host memory, and nothing of the store."""
        return bool(self._engine.flush_cache().success)

    def update_weights(self, *, folder: str) -> bool:
        return bool(self._engine.update_weights_from_disk(folder)[0])

    def shutdown(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()


def _answer(reply: dict[str, Any]) -> dict[str, Any]:
    told = reply["meta_info"]
    return {
        "token_ids": reply["output_ids"],
        "logprobs": [logprob for logprob, *_ in told["output_token_logprobs"]],
        "cached_count": told["cached_tokens"],
        "stored_count": (told["cached_tokens_details"] or {}).get("storage", 0),
    }


def main() -> None:
    # What libraries print must not come between the answers.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = Worker()
    for line in sys.stdin:
        job = json.loads(line)
        name = job.pop("job")
        does: Callable[..., Any] = getattr(worker, name)
        try:
            reply = {"result": does(**job)}
        except Exception as error:  # noqa: BLE001  (whoever asked is told, and decides)
            traceback.print_exc()
            reply = {"error": f"{name}: {type(error).__name__}: {error}"}
        print(json.dumps(reply), file=replies, flush=True)
    worker.shutdown()


if __name__ == "__main__":
    main()
