"""An engine that is measured, in a process of its own: `EngineProcess` of the tests, with two more jobs."""

from __future__ import annotations

import time
from typing import Any

from tests.engines.vllm_worker import Worker, serve


class MeasuredWorker(Worker):
    def first_token(self, *, token_ids: list[int]) -> dict[str, Any]:
        """One prompt, one token: from the call to the answer."""
        started_s = time.perf_counter()
        [output] = self._generate([token_ids], token_count=1)
        return {"first_token_s": time.perf_counter() - started_s, "cached_count": output.num_cached_tokens}

    def throughput(self, *, prompts: list[list[int]], token_count: int) -> dict[str, float]:
        """All prompts at once. `settled_s` counts what is still stored after the last token, too."""
        started_s, cpu_started_s = time.perf_counter(), time.thread_time()
        outputs = self._generate(prompts, token_count=token_count)
        took_s, cpu_s = time.perf_counter() - started_s, time.thread_time() - cpu_started_s
        self.settle()
        assert not any(output.num_cached_tokens for output in outputs), "prompts are to be new"
        return {"took_s": took_s, "thread_cpu_s": cpu_s, "settled_s": time.perf_counter() - started_s}

    def profile(self, *, token_ids: list[int]) -> dict[str, float]:
        """Seconds of each phase of one prompt that is loaded; see `phases`."""
        from bench.engines.phases import measure

        return measure(self._llm, lambda: self.first_token(token_ids=token_ids))

    def _generate(self, prompts: list[list[int]], *, token_count: int) -> Any:
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0.0, max_tokens=token_count, ignore_eos=True, detokenize=False)
        return self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)


if __name__ == "__main__":
    serve(MeasuredWorker())
