"""Reuse a prompt's prefix with Hugging Face transformers. Run `kvstore serve` first, then this twice.

    pip install '.[transformers]'     # in a checkout of this project
    python examples/transformers/generate.py Qwen/Qwen3-0.6B

The second run, though another process, restores the document instead of computing it.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

from kvstore_client import Client
from kvstore_client.integrations.transformers import PrefixCache


def main(name: str, document: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    prompt = f"{document.read_text()[:6000]}\n\nIn one sentence, this document says that"
    input_ids = tokenizer(prompt, return_tensors="pt").input_ids

    with Client() as client, PrefixCache(model, client) as prefixes:
        started_s = time.perf_counter()
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        answer = prefixes.generate(input_ids, max_new_tokens=32, do_sample=False, streamer=streamer)
        took_s = time.perf_counter() - started_s
        print(f"{answer.reused[0].token_count} of {input_ids.shape[1]} tokens reused, {took_s:.2f} s")
        offloaded = answer.offloaded[0].result()
        print(f"{offloaded.stored_count} of {len(offloaded.states)} computed blocks are in the store now")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: generate.py MODEL [DOCUMENT]\nMODEL: a Hugging Face name or folder")
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else __file__).resolve())
