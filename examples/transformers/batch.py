"""Several questions on one document, in one batch. Run `kvstore serve` first, then this twice.

    pip install '.[transformers]'     # in a checkout of this project
    python examples/transformers/batch.py Qwen/Qwen3-0.6B

The first run computes the document with the first question, and the others reuse it; the second run computes no more
than what is behind the last full block of each prompt.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvstore_client import Client
from kvstore_client.integrations.transformers import PrefixCache

QUESTIONS = ("In one sentence, this document says that", "Its title would be", "Whoever should read it is")


def main(name: str, document: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
    prompts = [tokenizer(f"{document.read_text()[:6000]}\n\n{question}").input_ids for question in QUESTIONS]

    with Client() as client, PrefixCache(model, client) as prefixes:
        # Prompts that are computed together cannot reuse each other, so the document comes first.
        prefixes.prefill(prompts[0]).offloaded.result()
        answers = prefixes.generate(prompts, max_new_tokens=16, do_sample=False, offload_generated=True)
        for question, prompt, sequence, reused in zip(
            QUESTIONS, prompts, answers.sequences, answers.reused, strict=True
        ):
            said = tokenizer.decode(sequence[max(map(len, prompts)) :], skip_special_tokens=True)
            print(f"[{reused.token_count} of {len(prompt)} tokens reused] {question} … {said.strip()!r}")
        offloaded = [future.result() for future in (*answers.offloaded, *answers.offloaded_generated)]
        print(f"{sum(part.stored_count for part in offloaded)} blocks are in the store now, too")


if __name__ == "__main__":
    if len(sys.argv) not in (2, 3):
        sys.exit("usage: batch.py MODEL [DOCUMENT]\nMODEL: a Hugging Face name or folder")
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else __file__).resolve())
