"""vLLM, told what to do by lines of JSON on stdin, and answering likewise; everything else that it says goes to stderr.

The first job is `start`, with the arguments of `vllm.LLM`.
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
        self._llm: Any = None

    def start(self, *, settings: dict[str, Any]) -> dict[str, Any]:
        from vllm import LLM

        self._llm = LLM(enforce_eager=True, disable_log_stats=False, seed=0, **settings)
        config = self._llm.llm_engine.vllm_config
        return {"block_tokens": config.cache_config.block_size, "group_count": self._group_count()}

    def generate(self, *, prompts: list[dict[str, Any]], token_count: int) -> list[dict[str, Any]]:
        """All prompts at once, greedy, always `token_count` tokens each."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        asked = SamplingParams(temperature=0.0, max_tokens=token_count, ignore_eos=True, logprobs=2, detokenize=False)
        adapters = [
            LoRARequest(prompt["lora_name"], prompt["lora_id"], prompt["lora_path"]) if "lora_path" in prompt else None
            for prompt in prompts
        ]
        outputs = self._llm.generate(
            [
                {"prompt_token_ids": prompt["token_ids"]} | ({"cache_salt": prompt["salt"]} if "salt" in prompt else {})
                for prompt in prompts
            ],
            asked,
            use_tqdm=False,
            lora_request=adapters if any(adapters) else None,
        )
        return [_answer(output) for output in outputs]

    def settle(self) -> None:
        """Goes on as long as the connector has something to do for requests that are finished."""
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        while scheduler.has_requests():
            self._llm.llm_engine.step()

    def forget(self) -> None:
        """Drops the engine's own prefix cache, and nothing of the store."""
        self.settle()
        assert self._llm.reset_prefix_cache(), "blocks are held though nothing is under way"

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name, summed over their labels."""
        sums: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            if value is not None:
                sums[metric.name] = sums.get(metric.name, 0.0) + value
        return sums

    def _group_count(self) -> int:
        scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
        return len(scheduler.kv_cache_config.kv_cache_groups)


def _answer(output: Any) -> dict[str, Any]:
    [completion] = output.outputs
    best_two = [
        sorted((entry.logprob for entry in entries.values()), reverse=True)[:2] for entries in completion.logprobs
    ]
    token_ids = list(completion.token_ids)
    metrics = output.metrics
    return {
        "token_ids": token_ids,
        "logprobs": [chosen[token].logprob for chosen, token in zip(completion.logprobs, token_ids, strict=True)],
        "margin": min(best - second for best, second in best_two),
        "cached_count": output.num_cached_tokens,
        "first_token_s": metrics.first_token_latency,
        "preemption_count": metrics.num_preemptions,
    }


def serve(worker: Worker) -> None:
    # What libraries print must not come between the answers.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
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


if __name__ == "__main__":
    serve(Worker())
