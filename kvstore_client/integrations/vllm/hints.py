"""What vLLM knows of a request that helps the store to keep the right blocks."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from kvstore.errors import InvalidArgumentError
from kvstore.messages import PRIORITY_MAX, FinishReason
from kvstore_client.hints import Hint

_LOG = logging.getLogger("vllm.kvstore")  # below vLLM's own logger, so that its handlers show it

_PREFIX = "kvstore."
"""Of what a caller says in `kv_transfer_params`: fields of `Hint`, such as `kvstore.session`."""
_FINISHES = {"FINISHED_STOPPED": FinishReason.END_TURN}
"""By the name of vLLM's status; all others that end a request are of another kind."""


class Hints:
    """Makes the hints of requests. What a caller says wrongly is left out, and said once."""

    def __init__(self, *, tool_stop_token_ids: Collection[int] = ()) -> None:
        """The ids of tokens by which the model ends an answer to call a tool."""
        self._tool_stop_token_ids = frozenset(tool_stop_token_ids)
        self._has_warned = False

    def of(self, request: Any, *, is_over: bool = False) -> Hint:
        """`is_over`: its answer has ended, however that came."""
        engines: dict[str, Any] = {"input_tokens": request.num_prompt_tokens, "priority": _priority(request.priority)}
        if request.session_id:
            engines["session"] = request.session_id
        if is_over:
            engines |= {"output_tokens": request.num_output_tokens, "finish": self._finish(request)}
        said = _said(request.kv_transfer_params)
        try:
            return Hint(**(engines | said))
        except (InvalidArgumentError, TypeError) as error:
            if not self._has_warned:
                self._has_warned = True
                _LOG.warning("what kv_transfer_params say of a request is left out: %s", error)
        engines.pop("session", None)  # it may have been that
        return Hint(**engines)

    def _finish(self, request: Any) -> FinishReason:
        finish = _FINISHES.get(str(request.status), FinishReason.OTHER)
        answer = request.output_token_ids
        is_tool_call = finish is FinishReason.END_TURN and len(answer) and answer[-1] in self._tool_stop_token_ids
        return FinishReason.TOOL_USE if is_tool_call else finish


def _said(params: Mapping[str, Any] | None) -> dict[str, Any]:
    return {name.removeprefix(_PREFIX): value for name, value in (params or {}).items() if name.startswith(_PREFIX)}


def _priority(priority: int) -> int:
    """In vLLM the lowest number goes first."""
    return min(max(-priority, -PRIORITY_MAX), PRIORITY_MAX)
