"""Tiny random models in Hugging Face folders: what engines load in tests.

`python -m tests.engines.models NAME…` prints the folders, and makes those that are not there yet. They are named for
their recipe, so that a changed one makes a new folder, and appear whole, by one rename.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
VOCABULARY_COUNT = 259
"""The bytes, then the padding, the start and the end of a text."""
_PADDING, _START, _END = 256, 257, 258
_MAKE_S_MAX = 300.0


def ensure_models(*names: str) -> list[Path]:
    """The folders of these models. They are made in a process of its own, so that this one loads no torch."""
    command = [sys.executable, "-m", "tests.engines.models", *names]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=_MAKE_S_MAX)
    if done.returncode:
        raise RuntimeError(f"{', '.join(names)} could not be made:\n{done.stderr}")
    return [Path(line) for line in done.stdout.splitlines()[-len(names) :]]


def _llama() -> Any:
    """3 KiB of K and V per token in bfloat16: one KV group."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_common(), num_key_value_heads=2, head_dim=64))


def _hybrid() -> Any:
    """Four layers with a window and two without: several KV groups."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layer_types = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    settings = {"num_key_value_heads": 1, "head_dim": 64, "sliding_window": 256, "layer_types": layer_types}
    return Gemma3ForCausalLM(Gemma3TextConfig(**_common(), **settings))


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_COUNT,
        "hidden_size": 512,
        "intermediate_size": 1024,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "max_position_embeddings": 8192,
        "pad_token_id": _PADDING,
        "bos_token_id": _START,
        "eos_token_id": _END,
        "tie_word_embeddings": False,
    }


def _write_model(build: Callable[[], Any], folder: Path, *, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    model = build()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.dim() > 1:
                # Wider than the library's default, or greedy output degenerates.
                parameter.normal_(std=0.06, generator=generator)
            else:
                parameter.fill_(0.0 if "Gemma" in type(model).__name__ or "bias" in name else 1.0)
    model.to(torch.bfloat16).save_pretrained(folder)
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """One token per byte, whose id is the byte."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = bytes_to_unicode()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special.values()])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


def _write_adapter(folder: Path, *, seed: int) -> None:
    """A LoRA adapter of the llama, in PEFT's format, that changes its output."""
    import torch
    from safetensors.torch import save_file

    config = _llama().config
    rank, width = 8, config.num_key_value_heads * config.head_dim
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, out_width in (("k_proj", width), ("v_proj", width)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, config.hidden_size, generator=generator) * 0.06
            weights[f"{prefix}.lora_B.weight"] = torch.randn(out_width, rank, generator=generator)
    save_file(
        {name: weight.to(torch.bfloat16) for name, weight in weights.items()}, folder / "adapter_model.safetensors"
    )
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": ["k_proj", "v_proj"],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | {"base_model_name_or_path": "tiny-llama"}))


_RECIPES: dict[str, Callable[[Path], None]] = {
    "tiny-llama": lambda folder: _write_model(_llama, folder, seed=0),
    "tiny-llama-reseeded": lambda folder: _write_model(_llama, folder, seed=1),
    "tiny-hybrid": lambda folder: _write_model(_hybrid, folder, seed=0),
    "tiny-lora": lambda folder: _write_adapter(folder, seed=0),
    "tiny-lora-reseeded": lambda folder: _write_adapter(folder, seed=1),
}


def _make(name: str) -> Path:
    if name == "gemma-3-270m":
        from gpu_agent.demo.model import ensure_default_model

        return ensure_default_model(lambda said: print(said, file=sys.stderr))
    recipe = hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()[:12]
    base = ROOT / ".pytest_cache" / "engine-models"
    target = base / recipe / name
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base) as partial:
            folder = Path(partial, name)
            folder.mkdir()
            _RECIPES[name](folder)
            try:
                folder.rename(target)
            except OSError:
                assert target.is_dir(), f"{target} cannot be made"  # else another process was faster
    return target


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(_make(name))
