"""The one place that needs a tokenizer, for logs of text."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.errors import InvalidArgumentError, UnavailableError
from kvstore_server.simulate.request_log import Tokenize


def load_tokenizer(name: str) -> Tokenize:
    """Of a model's name or folder, or of a tokenizer.json."""
    if importlib.util.find_spec("transformers") is None:
        raise UnavailableError(
            "--tokenizer needs transformers, which is not installed. "
            "In a checkout of this project: pip install '.[transformers]'"
        )
    import transformers

    try:
        if Path(name).is_file() and "model" not in json.loads(Path(name).read_bytes()):
            raise ValueError("it has no `model`")  # noqa: TRY301 - as if the library had said so
        # Typed in ways that no two versions share.
        tokenizer: Any = (
            transformers.PreTrainedTokenizerFast(tokenizer_file=name)  # type: ignore[no-untyped-call]
            if Path(name).is_file()
            else transformers.AutoTokenizer.from_pretrained(name)
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise InvalidArgumentError.of(
            "--tokenizer", name, f"a model's name or folder, or a tokenizer.json ({error})"
        ) from error

    def tokenize(prompt: str | Sequence[Mapping[str, Any]]) -> Sequence[int]:
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt))
        if not tokenizer.chat_template:
            raise InvalidArgumentError.of("--tokenizer", name, "one with a chat template, for logs with `messages`")
        return list(tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True, return_dict=False))

    return tokenize
