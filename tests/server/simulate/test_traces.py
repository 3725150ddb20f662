from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgumentError
from kvstore.eviction.use import Finish
from kvstore_server.simulate.tokenizers import load_tokenizer
from kvstore_server.simulate.trace import as_spans
from kvstore_server.simulate.traces import Limits, Reading, nearest_field, read_trace, write_trace
from tests.server.simulate.builders import PROMPTS, SMOKE, trace_of

HEAD = {"format": "kvtrace-1", "block_size": 10, "source": "made", "licence": "none"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def write_lines(path: Path, *lines: dict[str, Any] | str) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return path


def line(runs: Any, *, tokens: int, at_ms: float = 0, **fields: Any) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": tokens, "hash_runs": runs} | fields


def test_a_trace_is_read_with_all_that_it_says(path: Path) -> None:
    write_lines(
        path,
        HEAD | {"requests": 2, "unique_blocks": 4},
        line([[0, 3]], tokens=25, output_length=7, session_id=5, turn=1, stop="tool_use"),
        line([[0, 2], [3, 1]], tokens=30, at_ms=1500, expected_return_s=60, done=True, priority=-1, ttl_s=10),
    )
    trace = read_trace(path)
    first, second = trace.requests
    assert (trace.name, trace.tokens_per_block, trace.unique_blocks) == ("trace", 10, 4)
    assert (first.output_tokens, first.session_id, first.turn, first.finish) == (7, 5, 1, Finish.TOOL_USE)
    assert (second.time_s, second.expected_return_s, second.is_done) == (1.5, 60.0, True)
    assert (second.priority, second.ttl_s, second.finish) == (-1, 10.0, Finish.UNKNOWN)
    assert [trace.chain(request) for request in trace.requests] == [[0, 1, 2], [0, 1, 3]]
    assert trace.parents == [-1, 0, 1, 1]
    assert trace.tokens_of(first, 3) == 25, "the last block is partial"
    assert first.hint(tokens_per_block=10).is_last_partial
    assert not second.hint(tokens_per_block=10).is_last_partial


def test_a_compressed_trace_is_told_by_its_content_and_not_by_its_name(tmp_path: Path) -> None:
    misnamed = tmp_path / "trace.jsonl"
    misnamed.write_bytes(SMOKE.read_bytes())
    plain = tmp_path / "trace.jsonl.gz"
    plain.write_bytes(gzip.decompress(SMOKE.read_bytes()))
    assert read_trace(misnamed).requests == read_trace(plain).requests == read_trace(SMOKE).requests


@given(prompts=PROMPTS)
def test_what_is_written_reads_back_equal(prompts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("traces")
    trace = trace_of(*prompts, sessions=[index % 2 for index in range(len(prompts))])
    for name in ("made.jsonl", "made.jsonl.gz"):
        write_trace(trace, folder / name, real="nothing")
        again = read_trace(folder / name)
        assert (again.requests, again.unique_blocks) == (trace.requests, trace.unique_blocks)


def test_the_same_trace_is_written_as_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one.jsonl.gz", "two.jsonl.gz"):
        write_trace(trace_of("abc", "abd"), tmp_path / name, real="nothing")
    assert (tmp_path / "one.jsonl.gz").read_bytes() == (tmp_path / "two.jsonl.gz").read_bytes()


@given(numbers=st.lists(st.integers(0, 9), max_size=12))
def test_runs_stand_for_their_numbers(numbers: list[int]) -> None:
    assert [number for first, count in as_spans(numbers) for number in range(first, first + count)] == numbers


def test_blocks_of_mooncake_lines_are_known_by_their_whole_prefix(path: Path) -> None:
    write_lines(
        path,
        {"timestamp": 2000, "input_length": 1000, "output_length": 3, "hash_ids": [7, 9]},
        {"timestamp": 1000, "input_length": 600, "output_length": 3, "hash_ids": [8, 9]},
    )
    trace = read_trace(path)
    assert trace.tokens_per_block == 512
    assert [request.time_s for request in trace.requests] == [1.0, 2.0], "in order of arrival"
    assert [trace.chain(request) for request in trace.requests] == [[0, 1], [2, 3]]


def test_a_request_log_counts_full_blocks_of_its_tokens(path: Path) -> None:
    write_lines(
        path,
        {"timestamp": "2026-11-30T12:00:00Z", "session_id": "alice", "token_ids": [1, 2, 3, 4, 5]},
        {"timestamp": "2026-11-30T12:00:02Z", "session_id": "bob", "token_ids": [1, 2, 9, 9]},
        {
            "timestamp": "2026-11-30T12:00:04Z",
            "session_id": "alice",
            "token_ids": [1, 2, 3, 4],
            "finish_reason": "stop",
        },
    )
    trace = read_trace(path, reading=Reading(tokens_per_block=2))
    assert [trace.chain(request) for request in trace.requests] == [[0, 1], [0, 2], [0, 1]]
    assert [request.session_id for request in trace.requests] == [0, 1, 0]
    assert trace.requests[2].finish is Finish.END_TURN
    assert trace.duration_s == 4.0


def test_a_request_log_without_times_has_a_request_every_second(path: Path) -> None:
    write_lines(path, {"token_ids": [1] * 16}, {"token_ids": [1] * 32})
    assert [request.time_s for request in read_trace(path).requests] == [0.0, 1.0]


def test_a_log_of_text_needs_a_tokenizer_and_no_text_is_kept(path: Path, tmp_path: Path) -> None:
    write_lines(path, {"text": "to be or not to be"})
    with pytest.raises(InvalidArgumentError, match=r"line 1 has its prompt as `text`: .* --tokenizer"):
        read_trace(path)
    words = {"to": 1, "be": 2, "or": 3, "not": 4}
    tokenize = lambda text: [words[word] for word in str(text).split()]  # noqa: E731
    trace = read_trace(path, reading=Reading(tokens_per_block=2, tokenize=tokenize))
    assert trace.requests[0].block_count == 3
    write_trace(trace, tmp_path / "out.jsonl", real="all")
    assert "not" not in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()[1]


def test_a_tokenizer_reads_texts_and_conversations_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"to": 0, "be": 1, "or": 2}, unk_token="or"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    tokenize = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert tokenize("to be or be") == [0, 1, 2, 1]
    with pytest.raises(InvalidArgumentError, match=r"--tokenizer is .* chat template"):
        tokenize([{"role": "user", "content": "to be"}])
    wrong = write_lines(tmp_path / "wrong.json", {"a": 1})
    for name in (str(wrong), str(tmp_path / "missing")):
        with pytest.raises(InvalidArgumentError, match=r"--tokenizer is .*; allowed: a model's name or folder"):
            load_tokenizer(name)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((), "allowed: a trace of one request or more"),
        ((HEAD,), "allowed: a trace of one request or more"),
        (("{",), "line 1 is no JSON"),
        (("[1]",), r"line 1 is \[1\]; allowed: a JSON object"),
        (({"a": 1},), "line 1 is .* a line of Mooncake's"),
        (({"format": "kvtrace-9"},), "line 1: format is 'kvtrace-9'; allowed: kvtrace-1"),
        ((HEAD | {"block_size": 0},), "line 1: block_size is 0; allowed: a whole number from 1 to"),
        ((HEAD, line("x", tokens=5)), "line 2: hash_runs is 'x'; allowed: .*first, count"),
        ((HEAD, line([[0]], tokens=5)), r"line 2: hash_runs is \[\[0\]\]"),
        ((HEAD, line([[0, 1], [1]], tokens=5)), r"line 2: hash_runs is \[\[0, 1\], \[1\]\]"),
        ((HEAD, line([[0, 0]], tokens=5)), r"line 2: hash_runs is \[\[0, 0\]\]"),
        ((HEAD, line([[0, 10**12]], tokens=5)), "line 2: hash_runs is"),
        ((HEAD, line([[0, 0.5]], tokens=5)), "line 2: hash_runs is"),
        ((HEAD, line([[0, 1 << 19]] * 3, tokens=5)), "line 2: hash_runs is .*at most 1048576 in all"),
        ((HEAD, line([[0, 1]], tokens=5, at_ms=10**400)), "line 2: timestamp is"),
        (('{"token_ids": [' + "1" * 5000 + "]}",), "line 1 is no JSON"),
        ((HEAD, line([[1, 1]], tokens=5)), "line 2: hash_runs .* 0 is the next new one"),
        (
            (HEAD, line([[0, 2]], tokens=20), line([[1, 1]], tokens=9)),
            "line 3: hash_runs .* 1 follows 0 elsewhere, noth",
        ),
        ((HEAD, line([[0, 3]], tokens=30), line([[0, 1], [2, 1]], tokens=20)), "2 follows 1 elsewhere, 0 here"),
        ((HEAD, line([[0, 1]], tokens=50)), r"line 2: hash_runs is '1 blocks'; allowed: 5 or 5 blocks"),
        ((HEAD, line([[0, 4]], tokens=25, added_blocks=1)), r"line 2: hash_runs is '3 blocks'; allowed: 2 or 2 blocks"),
        ((HEAD, line([[0, 1]], tokens=5, added_blocks=2)), r"line 2: hash_runs is '-1 blocks'; allowed: 0 or 0"),
        ((HEAD, line([[0, 1]], tokens=5, added_blocks="x")), "line 2: added_blocks is 'x'; allowed: a whole number"),
        ((HEAD, line([[0, 1]], tokens=-5)), "line 2: input_length is -5"),
        ((HEAD, line([[0, 1]], tokens=5, turn=0)), "line 2: turn is 0"),
        ((HEAD, line([[0, 1]], tokens=5, priority=3)), "line 2: priority is 3; allowed: a whole number from -2 to 2"),
        ((HEAD, line([[0, 1]], tokens=5, stop=1)), "line 2: stop is 1; allowed: tool_use, end_turn or other"),
        ((HEAD, line([[0, 1]], tokens=5, done="yes")), "line 2: done is 'yes'; allowed: true or false"),
        ((HEAD, line([[0, 1]], tokens=5, at_ms="noon")), "line 2: timestamp is 'noon'"),
        ((HEAD, line([[0, 1]], tokens=5, at_ms=9), line([[0, 1]], tokens=5)), "line 3: timestamp .* 9 or more"),
        ((HEAD | {"requests": 2}, line([[0, 1]], tokens=5)), "line 1: requests is 2; allowed: 1, which follow"),
        (({"hash_ids": ["a"], "timestamp": 0, "input_length": 5},), "line 1: hash_ids is .* list of whole numbers"),
        (({"token_ids": [1.5]},), "line 1: token_ids is"),
        (({"token_ids": [1]}, {"tokens": [1]}), "line 2: token_ids is None; allowed: one of token_ids"),
        (({"token_ids": [1]}, {"token_ids": [1], "timestamp": 1}), "line 2: timestamp is 1; allowed: in all lines"),
        (({"token_ids": [1], "session_id": [1]},), "line 1: session_id is"),
    ],
)
def test_a_wrong_line_is_named_with_field_value_and_what_is_allowed(
    path: Path, lines: tuple[dict[str, Any] | str, ...], message: str
) -> None:
    write_lines(path, *lines)
    with pytest.raises(InvalidArgumentError, match=message) as caught:
        read_trace(path)
    assert re.search(r"trace\.jsonl", str(caught.value))


def test_a_file_that_is_cut_off_or_missing_is_named(tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl.gz"
    cut.write_bytes(SMOKE.read_bytes()[:2000])
    with pytest.raises(InvalidArgumentError, match=r"cut\.jsonl\.gz cannot be read after line"):
        read_trace(cut)
    binary = tmp_path / "binary.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgumentError, match=r"binary\.jsonl cannot be read"):
        read_trace(binary)
    with pytest.raises(InvalidArgumentError, match=r"missing\.jsonl'; allowed: a file that can be read"):
        read_trace(tmp_path / "missing.jsonl")


def test_a_small_file_that_unfolds_into_a_huge_line_costs_no_more_memory_than_a_line_may(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.jsonl.gz"
    for opening in ('{"token_ids": [', ""):
        bomb.write_bytes(gzip.compress((opening + "1," * (17 << 20)).encode()))
        assert bomb.stat().st_size < 100_000
        with pytest.raises(InvalidArgumentError, match=r"line 1, has more than 33554432 characters"):
            read_trace(bomb)


@pytest.mark.parametrize(
    ("limits", "named"),
    [
        (Limits(line_characters_max=20), "line 2, has more than 20 characters"),
        (Limits(text_characters_max=40), "up to line 2, has more than 40 characters"),
        (Limits(request_count_max=2), "up to line 4, has more than 2 requests"),
    ],
)
def test_a_file_beyond_the_bounds_is_refused_where_it_passes_them(path: Path, limits: Limits, named: str) -> None:
    write_lines(path, {"token_ids": [1]}, {"token_ids": [1, 2]}, " ", {"token_ids": [1]})
    assert len(read_trace(path).requests) == 3
    with pytest.raises(InvalidArgumentError, match=re.escape(named)):
        read_trace(path, reading=Reading(limits=limits))


def test_fields_that_mean_nothing_are_counted_in_every_format(path: Path) -> None:
    log = ({"token_ids": [1], "model": "m", "sesion_id": 3}, {"token_ids": [1], "model": "m"})
    assert read_trace(write_lines(path, *log)).ignored_fields == {"model": 2, "sesion_id": 1}
    mooncake = {"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [7], "user": 1}
    assert read_trace(write_lines(path, mooncake)).ignored_fields == {"user": 1}
    own = (HEAD | {"sizes": 1}, line([[0, 1]], tokens=9, stopp="end_turn"))
    assert read_trace(write_lines(path, *own)).ignored_fields == {"sizes": 1, "stopp": 1}
    assert read_trace(SMOKE).ignored_fields == {}


def test_however_many_names_a_file_has_a_bounded_number_of_them_is_told_apart(path: Path) -> None:
    write_lines(path, {"token_ids": [1]} | {f"field {number}": 1 for number in range(1000)})
    assert len(read_trace(path).ignored_fields) == 100


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("sesion_id", "session_id"),
        ("sessionId", "session_id"),
        ("Timestamp", "timestamp"),
        ("ttl", "ttl_s"),
        ("prority", "priority"),
        ("finish_reasons", "finish_reason"),
        ("model", None),
        ("user_agent", None),
    ],
)
def test_a_misspelt_field_is_told_from_an_unknown_one(written: str, meant: str | None) -> None:
    assert nearest_field(written) == meant


def test_a_block_size_that_contradicts_the_trace_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="--block-tokens is 64; allowed: 512"):
        read_trace(SMOKE, reading=Reading(tokens_per_block=64))
