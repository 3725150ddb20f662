"""The whole of it: model and text in, report out."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from gpu_agent.ablate.report import Report
from gpu_agent.ablate.run import Subject, forward_count, measure
from gpu_agent.ablate.settings import (
    Score,
    Setting,
    Tier,
    exact_of,
    first_settings,
    layer_groups,
    layer_settings,
    tier_settings,
)
from gpu_agent.ablate.texts import Passage, cut_windows, hide_needles, read_texts
from gpu_agent.demo import model as models
from kvstore.errors import InvalidArgumentError
from kvstore.precision import encoded_layout

BUNDLED_NAME = "the text that comes along"


class Watch(Protocol):
    """Told how far it is."""

    def begin(self, text: str, *, step_count: int | None) -> None:
        """What is done now, in so many steps if that is known."""

    def advance(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What is to be measured."""

    model: str | None
    """None: the model that `kvstore demo` has."""
    texts: tuple[Path, ...]
    """None at all: the text that comes with this package."""
    precisions: tuple[str, ...]
    tiers: tuple[Tier, ...]
    layer_group_count: int
    window_count_max: int
    window_tokens: int
    tokens_per_block: int
    seed: int
    device: str


def ablate_model(request: Request, watch: Watch) -> Report:
    """Raises `InvalidArgumentError` for what cannot be measured, before anything is."""
    started_s = time.monotonic()
    text = read_texts(request.texts)
    window_tokens, tokens_per_block = request.window_tokens, request.tokens_per_block
    tiers = request.tiers
    subject, tokenizer, name = _load(request.model, device=request.device, watch=watch)
    layout = subject.layout(tokens_per_block=tokens_per_block)
    for precision in request.precisions:
        encoded_layout(layout, k_precision=precision, v_precision=precision)
    if subject.tokens_max is not None and window_tokens > subject.tokens_max:
        raise InvalidArgumentError.of("--window-tokens", window_tokens, f"up to {subject.tokens_max}, the model's most")
    if window_tokens < 2 * tokens_per_block:
        raise InvalidArgumentError.of("--window-tokens", window_tokens, f"at least {2 * tokens_per_block}, two blocks")
    groups = layer_groups(subject.shape.num_layers, count=request.layer_group_count, layer_types=subject.layer_types)
    passages = cut_windows(
        tokenizer,
        text,
        window_tokens=window_tokens,
        window_count_max=request.window_count_max,
        first_scored=tokens_per_block,
    )
    haystacks = hide_needles(tokenizer, passages, tokens_per_block=tokens_per_block, seed=request.seed)

    def run(title: str, settings: list[Setting], read: list[Passage]) -> dict[Setting, Score]:
        count = forward_count(read, setting_count=len(settings), tokens_per_block=tokens_per_block)
        watch.begin(title, step_count=count)
        return measure(subject, settings, read, tokens_per_block=tokens_per_block, on_forward=watch.advance)

    everything = [*passages, *haystacks]
    planes = run("1 of 3: planes", first_settings(request.precisions, tier=tiers[0]), everything)
    exact = exact_of(planes)
    scores = dict(planes)
    # What differs between layers is far larger than what half of the text leaves open.
    half = passages[: (len(passages) + 1) // 2]
    for title, further, read in (
        ("2 of 3: what hurt, by tier", tier_settings(planes, tiers=tiers), everything),
        ("3 of 3: what hurt most, by layers", layer_settings(planes, groups=groups), half),
    ):
        if further:
            found = run(title, [exact, *further], read)
            scores |= {setting: found[setting] for setting in further}
    return Report(
        model=name,
        texts=tuple(str(path) for path in request.texts) or (BUNDLED_NAME,),
        layout=layout,
        tiers=tiers,
        window_tokens=window_tokens,
        window_count=len(passages),
        scored_tokens=sum(len(passage.scored) for passage in passages),
        needle_count=sum(len(haystack.answers) for haystack in haystacks),
        seed=request.seed,
        thread_count=torch.get_num_threads(),
        elapsed_s=time.monotonic() - started_s,
        scores=scores,
    )


def _load(model: str | None, *, device: str, watch: Watch) -> tuple[Subject, Any, str]:
    """The model in float32, its tokenizer and its name."""
    watch.begin("loading the model", step_count=None)
    folder = (
        str(models.ensure_default_model(lambda text: watch.begin(text, step_count=None))) if model is None else model
    )
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        loaded = models.load(folder, dtype="auto")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError.of(
            "--model", folder, f"a folder or name of a decoder with its tokenizer; it cannot be loaded: {error}"
        ) from error
    stored_dtype = loaded.dtype
    try:
        loaded = loaded.float().to(device)
    except (RuntimeError, AssertionError) as error:
        raise InvalidArgumentError.of("--device", device, f"cpu, or cuda:N of a CUDA device here ({error})") from error
    subject = Subject.of(loaded, stored_dtype=stored_dtype)
    return subject, tokenizer, models.DEFAULT_MODEL_NAME if model is None else model
