from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

torch = pytest.importorskip("torch", reason="needs the [demo] extra")
transformers = pytest.importorskip("transformers", reason="needs the [demo] extra")
pytest.importorskip("rich", reason="needs the [demo] extra")

from gpu_agent.ablate.cli import ablate  # noqa: E402
from gpu_agent.ablate.page import page, write_report  # noqa: E402
from gpu_agent.ablate.past import Past  # noqa: E402
from gpu_agent.ablate.report import Report  # noqa: E402
from gpu_agent.ablate.run import Subject, forward_count, measure  # noqa: E402
from gpu_agent.ablate.settings import (  # noqa: E402
    LayerGroup,
    Score,
    Setting,
    Stage,
    Tier,
    first_settings,
    layer_groups,
    layer_settings,
    parse_tiers,
    recommend,
    tier_settings,
)
from gpu_agent.ablate.texts import BUNDLED, Passage, cut_windows, hide_needles  # noqa: E402
from gpu_agent.precision.reference import decode, encode  # noqa: E402
from kvstore.errors import InvalidArgumentError, UnavailableError  # noqa: E402
from kvstore.layout import BlockLayout, LayoutOrder  # noqa: E402
from tests.demo.tiny import save_byte_tokenizer, save_tiny_model  # noqa: E402
from tests.transformers.conftest import build_model  # noqa: E402

MEMORY = Tier(name="memory", age_tokens=0)
NVME = Tier(name="nvme", age_tokens=64)
BLOCK = 16
SMALL = {"hidden_size": 64, "intermediate_size": 64}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def setting(*, k: str = "exact", v: str = "exact", tier: Tier = MEMORY, group: LayerGroup | None = None) -> Setting:
    stage = Stage.LAYERS if group else Stage.PLANE if k != v else Stage.BOTH if k != "exact" else Stage.BASE
    return Setting(stage=stage, k=k, v=v, tier=tier, group=group)


def score(
    change_percent: float, *, error_percent: float = 0.01, recall: float | None = 1.0, agreement: float = 1.0
) -> Score:
    return Score(
        perplexity=20.0 * (1 + change_percent / 100),
        change_percent=change_percent,
        change_error_percent=error_percent,
        greedy_agreement=agreement,
        kl_mean=abs(change_percent),
        kl_p99=abs(change_percent),
        needle_recall=recall,
        refused_count=0,
    )


# What is measured, and what follows from it.


def test_values_are_lowered_first_then_keys_then_both() -> None:
    found = [(one.k, one.v) for one in first_settings(("fp8", "int4"), tier=MEMORY)]
    assert found == [
        ("exact", "exact"),
        *[("exact", "fp8"), ("exact", "int4")],
        *[("fp8", "exact"), ("int4", "exact")],
        *[("fp8", "fp8"), ("int4", "int4")],
    ]


def test_what_hurt_is_tried_again_in_lower_tiers_and_the_worst_of_each_plane_in_parts_of_the_model() -> None:
    scores = {
        setting(): score(0.0),
        setting(v="int8"): score(0.02),
        setting(v="int4"): score(0.4),
        setting(k="int8"): score(0.5),
        setting(k="int4"): score(9.0),
        setting(k="int8", v="int8"): score(0.6),
    }
    assert [(one.k, one.v, one.where) for one in tier_settings(scores, tiers=(MEMORY, NVME))] == [
        ("exact", "int4", "nvme"),
        ("int8", "exact", "nvme"),
        ("int4", "exact", "nvme"),
    ]
    groups = layer_groups(6, count=2, layer_types=None)
    assert [(one.k, one.v, one.where) for one in layer_settings(scores, groups=groups)] == [
        ("exact", "int4", "layers 0-2"),
        ("exact", "int4", "layers 3-5"),
        ("int4", "exact", "layers 0-2"),
        ("int4", "exact", "layers 3-5"),
    ]


def test_nothing_is_taken_apart_where_nothing_hurt() -> None:
    scores = {setting(): score(0.0), setting(v="int8"): score(0.02)}
    assert tier_settings(scores, tiers=(MEMORY, NVME)) == []
    assert layer_settings(scores, groups=layer_groups(6, count=2, layer_types=None)) == []


def test_each_tier_is_recommended_the_smallest_harmless_values_and_exact_keys() -> None:
    scores = {
        setting(): score(0.0),
        setting(v="int8"): score(0.02),
        setting(v="int4"): score(0.4),
        setting(k="int8", v="int8"): score(0.03),
        setting(v="int4", tier=NVME): score(0.05),
    }
    found = recommend(scores, tiers=(MEMORY, NVME), size_ratios={"exact": 1.0, "int8": 0.5, "int4": 0.3})
    assert {tier: (one.k, one.v) for tier, one in found.items()} == {
        "memory": ("exact", "int8"),
        "nvme": ("exact", "int4"),
    }


def test_of_two_precisions_of_as_many_bits_the_better_one_is_recommended() -> None:
    scores = {setting(): score(0.0), setting(v="fp8"): score(0.04), setting(v="int8"): score(0.02)}
    (chosen,) = recommend(scores, tiers=(MEMORY,), size_ratios={"exact": 1.0, "fp8": 0.75, "int8": 0.754}).values()
    assert chosen.v == "int8"


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        (score(0.2), "too much perplexity"),
        (score(-0.2), "another model, if no worse on this text"),
        (score(0.05, error_percent=0.06), "too little text to tell"),
        (score(0.0, agreement=0.98), "other tokens"),
        (score(0.0, recall=0.9), "a needle is lost"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values_stay_exact_where_it_is_not_sure_that_they_may_be_lowered(measured: Score, why: str) -> None:
    scores = {setting(): score(0.0), setting(v="int8"): measured}
    (chosen,) = recommend(scores, tiers=(MEMORY,), size_ratios={"exact": 1.0, "int8": 0.5}).values()
    assert chosen.v == "exact", why


def test_layer_groups_cover_every_layer_once_and_kinds_of_attention_besides() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    *runs, sliding, full = layer_groups(7, count=3, layer_types=kinds)
    assert [layer for group in runs for layer in group.layers] == list(range(7))
    assert (sliding.name, sliding.layers) == ("sliding attention layers", (0, 1, 3, 4, 6))
    assert (full.name, full.layers) == ("full attention layers", (2, 5))
    assert layer_groups(7, count=0, layer_types=kinds) == []
    with pytest.raises(InvalidArgumentError, match="--layer-groups is 8; allowed: 0"):
        layer_groups(7, count=8, layer_types=None)


def test_tiers_are_named_with_rising_ages() -> None:
    assert parse_tiers("memory=0, nvme=64") == (MEMORY, NVME)
    for text in ("memory", "memory=64", "memory=0,nvme=0", "memory=0,memory=9", "memory=0,nvme=-1", "=0", ""):
        with pytest.raises(InvalidArgumentError, match="--tiers is"):
            parse_tiers(text)


# What the model has of the past.


def past_with(settings: list[Setting], *, block_count: int, poison: Callable[[Any], None] = lambda _: None) -> Any:
    """A past of random K and V in bfloat16's range, in 3 layers, and what it was given."""
    generator = torch.Generator().manual_seed(0)
    past = Past(settings, tokens_per_block=BLOCK, stored_dtype=torch.bfloat16)
    given = []
    for _ in range(block_count):
        planes = torch.randn((3, 2, 1, 2, BLOCK, 32), generator=generator).bfloat16().float()
        poison(planes)
        for layer in range(3):
            k, v = (plane.expand(len(settings), -1, -1, -1) for plane in planes[layer])
            past.cache.update(k, v, layer)
        past.block_filled()
        given.append(planes[:, :, 0])
    return past, torch.cat(given, dim=-2)


def planes_of(past: Any, row: int) -> Any:
    return torch.stack([torch.stack([layer.keys[row], layer.values[row]]) for layer in past.cache.layers])


def test_full_blocks_are_what_the_codec_gives_back_plane_by_plane() -> None:
    past, given = past_with([setting(), setting(v="int4"), setting(k="int8", v="fp8")], block_count=3)
    assert torch.equal(planes_of(past, 0), given)
    for row, precisions in ((1, ("exact", "int4")), (2, ("int8", "fp8"))):
        for plane, precision in enumerate(precisions):
            for start in range(0, 3 * BLOCK, BLOCK):
                block = given[:, plane, :, start : start + BLOCK].bfloat16()
                wanted = decode(encode(block, precision, kind=("K", "V")[plane]), torch.bfloat16).float()
                assert torch.equal(planes_of(past, row)[:, plane, :, start : start + BLOCK], wanted)


def test_the_bits_that_the_stored_dtype_has_not_are_gone_and_what_is_no_full_block_stays_as_it_was() -> None:
    past = Past([setting(v="int8")], tokens_per_block=BLOCK, stored_dtype=torch.bfloat16)
    fine = torch.full((1, 1, BLOCK, 32), 1 + 2**-12)
    past.cache.update(fine, fine, 0)
    past.block_filled()
    past.cache.update(fine[:, :, :5], fine[:, :, :5], 0)
    assert (past.cache.layers[0].keys[:, :, :BLOCK] == 1.0).all()
    assert torch.equal(past.cache.layers[0].keys[:, :, BLOCK:], fine[:, :, :5])


def test_a_lower_tier_gets_blocks_only_when_they_are_old_enough() -> None:
    past, given = past_with([setting(v="int4", tier=Tier(name="nvme", age_tokens=20))], block_count=4)
    is_same = [
        torch.equal(planes_of(past, 0)[..., start : start + BLOCK, :], given[..., start : start + BLOCK, :])
        for start in range(0, 4 * BLOCK, BLOCK)
    ]
    # 20 tokens back is the third block counted from the end: the one before it ends 16 tokens back.
    assert is_same == [False, False, True, True]


def test_layers_outside_the_group_stay_exact() -> None:
    group = LayerGroup(name="layer 1", layers=(1,))
    past, given = past_with([setting(k="int4", group=group)], block_count=1)
    found = planes_of(past, 0)
    assert torch.equal(found[[0, 2]], given[[0, 2]])
    assert not torch.equal(found[1, 0], given[1, 0])
    assert torch.equal(found[1, 1], given[1, 1])


def test_a_block_that_cannot_be_encoded_within_its_bound_stays_exact_and_is_counted() -> None:
    def poison(planes: Any) -> None:
        planes[1, 1, 0, 0, 3, 7] = math.inf

    past, given = past_with([setting(k="int8", v="int8")], block_count=1, poison=poison)
    assert past.refused_counts == [1]
    assert torch.equal(planes_of(past, 0)[:, 1], given[:, 1])
    assert not torch.equal(planes_of(past, 0)[:, 0], given[:, 0])


# The measuring.


def random_windows(*, count: int = 2, tokens: int = 96) -> list[Passage]:
    generator = torch.Generator().manual_seed(3)
    return [
        Passage(
            ids=tuple(torch.randint(3, 256, (tokens,), generator=generator).tolist()),
            scored=range(BLOCK, tokens),
            answers=(),
        )
        for _ in range(count)
    ]


def run(model: Any, settings: list[Setting], passages: list[Passage], *, dtype: Any = None) -> dict[Setting, Score]:
    subject = Subject.of(model, stored_dtype=dtype or torch.bfloat16)
    calls: list[None] = []
    found = measure(subject, settings, passages, tokens_per_block=BLOCK, on_forward=lambda: calls.append(None))
    assert len(calls) == forward_count(passages, setting_count=len(settings), tokens_per_block=BLOCK)
    return found


def test_with_exact_blocks_the_perplexity_is_the_models_own() -> None:
    model = build_model("gemma3")
    windows = random_windows(tokens=64)
    losses = []
    for window in windows:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([window.ids])).logits[0]
        own = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(window.ids[1:]), reduction="none")
        losses.append(own[BLOCK - 1 :])
    (found,) = run(model, [setting()], windows, dtype=torch.float32).values()
    assert found.perplexity == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)
    assert (found.change_percent, found.kl_mean, found.greedy_agreement) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(("family", "changes"), [("mistral", SMALL), ("gpt2", {})], ids=["mistral", "gpt2"])
def test_fewer_bits_move_the_model_further_and_the_same_each_time(family: str, changes: dict[str, Any]) -> None:
    model = build_model(family, **changes)
    settings = first_settings(("int8", "int4"), tier=MEMORY)
    found = run(model, settings, random_windows())
    divergences = {(one.k, one.v): score.kl_mean for one, score in found.items()}
    assert 0 < divergences["exact", "int8"] < divergences["exact", "int4"]
    assert 0 < divergences["int8", "exact"] < divergences["int4", "exact"]
    assert run(model, settings, random_windows()) == found


def test_as_many_settings_as_one_likes_are_measured_as_if_alone() -> None:
    model = build_model("mistral", **SMALL)
    many = [setting(), *(setting(v="int4", tier=Tier(name=str(age), age_tokens=age)) for age in range(0, 160, 16))]
    found = run(model, many, random_windows(count=1))
    (_, alone) = run(model, [many[0], many[4]], random_windows(count=1)).values()
    assert found[many[4]].kl_mean == pytest.approx(alone.kl_mean, rel=1e-3)
    # All blocks of the window are younger than that.
    assert found[many[-1]].kl_mean == pytest.approx(0.0, abs=1e-9)


class Oracle(torch.nn.Module):
    """Knows every next token but those it is told to miss; its K and V are of no interest."""

    config = SimpleNamespace(get_text_config=lambda decoder: SimpleNamespace(num_hidden_layers=1))
    device = torch.device("cpu")

    def __init__(self, ids: tuple[int, ...], *, missed: set[int]) -> None:
        super().__init__()
        self._told = [300 if at in missed else token for at, token in enumerate([*ids[1:], 0], start=1)]
        self.eval()

    def forward(self, input_ids: Any, past_key_values: Any, use_cache: bool, logits_to_keep: int = 0) -> Any:
        start = past_key_values.get_seq_length()
        row_count, token_count = input_ids.shape
        plane = torch.ones((row_count, 1, token_count, 4))
        past_key_values.update(plane, plane, 0)
        told = torch.tensor(self._told[start : start + token_count][-logits_to_keep:])
        return SimpleNamespace(logits=torch.nn.functional.one_hot(told, 301).float().expand(row_count, -1, -1))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("tokenizer")
    save_byte_tokenizer(path)
    return transformers.AutoTokenizer.from_pretrained(path)


def haystack_of(tokenizer: Any, *, tokens: int = 1024) -> Passage:
    text = BUNDLED.read_text(encoding="utf-8")
    windows = cut_windows(tokenizer, text, window_tokens=tokens, window_count_max=2, first_scored=BLOCK)
    return hide_needles(tokenizer, windows, tokens_per_block=BLOCK, seed=0)[0]


def test_each_needle_is_in_the_text_once_before_it_is_asked_for(tokenizer: Any) -> None:
    haystack = haystack_of(tokenizer)
    assert len(haystack.ids) == 1024
    assert len(haystack.answers) >= 2
    text = tokenizer.decode(haystack.ids)
    for answer in haystack.answers:
        number = tokenizer.decode(haystack.ids[answer.start : answer.stop]).strip()
        assert re.fullmatch(r"\d{4}", number)
        asked = tokenizer.decode(haystack.ids[: answer.start])
        question = asked[asked.rindex("The secret") :]
        assert f"{question} {number}." in text[: len(asked) - 200]


def test_a_needle_counts_only_when_every_token_of_it_is_told(tokenizer: Any) -> None:
    haystack = haystack_of(tokenizer)
    first, *rest = haystack.answers
    for missed, recall in (
        (set(), 1.0),
        ({first[2]}, len(rest) / len(haystack.answers)),
        # What is not the answer may be anything.
        ({first.start - 1, first.stop}, 1.0),
        ({answer[-1] for answer in haystack.answers}, 0.0),
    ):
        # Block-long texts around it: the model is asked for nothing else.
        window = Passage(ids=haystack.ids, scored=range(BLOCK, len(haystack.ids)), answers=())
        found = run(Oracle(haystack.ids, missed=missed), [setting()], [window, haystack])
        assert found[setting()].needle_recall == recall


def test_texts_are_cut_into_whole_windows_behind_the_tokenizers_own_prefix(tokenizer: Any) -> None:
    windows = cut_windows(tokenizer, "abcdefghij" * 20, window_tokens=64, window_count_max=9, first_scored=BLOCK)
    assert [(window.ids[0], len(window.ids)) for window in windows] == [(256, 64)] * 3
    assert tokenizer.decode(windows[1].ids[1:4]) == "def"
    with pytest.raises(InvalidArgumentError, match=r"--text is '100 tokens'; allowed: at least 126, for two windows"):
        cut_windows(tokenizer, "a" * 100, window_tokens=64, window_count_max=9, first_scored=BLOCK)


# The report.


def make_report(scores: dict[Setting, Score]) -> Report:
    return Report(
        model="<b>model",
        texts=("a & b.txt",),
        layout=BlockLayout(
            num_layers=6, num_kv_heads=2, head_dim=64, v_head_dim=64, tokens_per_block=BLOCK, dtype="bfloat16",
            order=LayoutOrder.HND,
        ),
        tiers=(MEMORY, NVME),
        window_tokens=96,
        window_count=2,
        scored_tokens=160,
        needle_count=4,
        seed=0,
        thread_count=1,
        elapsed_s=1.25,
        scores=scores,
    )  # fmt: skip


REPORT = make_report(
    {
        setting(): score(0.0),
        setting(v="int8"): score(0.02),
        setting(k="int4"): score(7.0),
        setting(k="int4", group=LayerGroup(name="layers 0-2", layers=(0, 1, 2))): score(3.0),
    }
)


def test_the_report_says_what_a_block_takes_with_its_scales() -> None:
    int8 = REPORT.to_json()["settings"][1]
    # Half of V in half the bytes, and for every 64 elements a minimum and a scale of two bytes each.
    assert int8["size_ratio"] == pytest.approx(0.5 + 0.25 + 0.5 * 4 / 128)
    assert (int8["is_harmless"], REPORT.to_json()["recommended"]["nvme"]) == (True, {"k": "exact", "v": "int8"})
    json.dumps(REPORT.to_json())


def test_the_page_needs_no_other_file_and_shows_names_as_they_are() -> None:
    text = page(REPORT, b"plot")
    assert "&lt;b&gt;model" in text
    assert "a &amp; b.txt" in text
    assert re.findall(r'(?:src|href)="([^"]{5})', text) == ["data:"]
    assert "//" not in text.replace("image/png", "")
    assert text.count("<tr") == 1 + len(REPORT.scores)


def test_the_report_is_written_as_a_plot_and_a_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
    plot, written = write_report(REPORT, tmp_path / "new")
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert written.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    (tmp_path / "file").write_text("")
    with pytest.raises(UnavailableError, match="cannot be written"):
        write_report(REPORT, tmp_path / "file" / "sub")


# The command.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("ablate") / "tiny", "mistral", **SMALL)


def call(*arguments: object) -> Result:
    return CliRunner().invoke(ablate, [str(argument) for argument in arguments])


def test_the_command_measures_any_model_on_any_text(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    text.write_text("A text of one's own. " * 40, encoding="utf-8")
    ended = call("--model", folder, "--text", text, "--window-tokens", 192, "--precisions", "int8,int4", "--json")
    assert ended.exit_code == 0, ended.output
    found = json.loads(ended.stdout)
    assert (found["window_count"], found["scored_tokens"]) == (2, 2 * (192 - 32))
    assert found["texts"] == [str(text)]
    assert found["tiers"] == {"memory": 0, "nvme": 96}
    first = [(one["k"], one["v"]) for one in found["settings"] if one["stage"] in ("base", "plane", "both")]
    assert first == [(one.k, one.v) for one in first_settings(("int8", "int4"), tier=MEMORY)]
    assert set(found["recommended"]) == {"memory", "nvme"}


def test_the_table_names_every_setting(folder: Path) -> None:
    ended = call("--model", folder, "--quick", "--window-tokens", 128, "--precisions", "int4")
    assert ended.exit_code == 0, ended.output
    for word in ("exact", "int4", "memory", "perplexity", "Recommended: memory: K exact", "Keys stay exact"):
        assert word in ended.stdout


def error_of(*arguments: object) -> str:
    ended = call(*arguments)
    assert isinstance(ended.exception, InvalidArgumentError), ended.exception
    return str(ended.exception)


def test_what_cannot_be_measured_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too short", encoding="utf-8")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "--precisions is 'int3'" in error_of("--model", folder, "--precisions", "int8,int3")
    assert "--text is" in error_of("--model", folder, "--text", tmp_path / "none.txt")
    assert "UTF-8" in error_of("--model", folder, "--text", binary)
    assert "--text is '9 tokens'" in error_of("--model", folder, "--text", short)
    assert "--window-tokens is 5000" in error_of("--model", folder, "--window-tokens", 5000)
    assert "--layer-groups is 50" in error_of("--model", folder, "--layer-groups", 50)
    assert "--device is 'cuda:77'" in error_of("--model", folder, "--device", "cuda:77")
    assert "--model is" in error_of("--model", tmp_path / "nowhere")


def test_a_model_without_k_and_v_of_every_token_is_refused(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    config = transformers.MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=2, state_size=4)
    transformers.MambaForCausalLM(config).save_pretrained(tmp_path)
    assert "MambaForCausalLM" in error_of("--model", tmp_path)
