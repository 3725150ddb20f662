"""The engine process for LMCache, which loads numba: vLLM's CPU platform fails to start where numba is loaded before.

Its scan of all modules' attributes takes what `vars` gives for a dictionary, which llvmlite's functions do not have.
"""

from __future__ import annotations

import builtins
from typing import Any

from vllm.triton_utils import dispatcher

from bench.engines.worker import MeasuredWorker
from tests.engines.vllm_worker import serve


def _vars(value: Any) -> dict[str, Any]:
    found = builtins.vars(value)
    return found if isinstance(found, dict) or hasattr(found, "get") else {}


if __name__ == "__main__":
    dispatcher.vars = _vars
    serve(MeasuredWorker())
