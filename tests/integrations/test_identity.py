"""What a model's files are, by content: other weights are never taken for the same, whatever they are called."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore.namespace import STRING_MAX_BYTES
from kvstore_client.integrations._identity import (
    adapter_revision,
    canonical_json,
    model_label,
    model_revision,
    position_settings,
    settings_digest,
    weights_revision,
)

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where digests are kept, in a folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvstore" / "digests.json"


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[..., Path]:
    def make(name: str, **files: bytes) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        for stem, content in (files or {"a": b"1", "b": b"2"}).items():
            (folder / f"{stem}.safetensors").write_bytes(content)
        return folder

    return make


def test_equal_files_are_equal_models_wherever_they_lie(make_model: Callable[..., Path]) -> None:
    one, other = make_model("one"), make_model("deep/other")
    (other / "README.md").write_text("not a weight")
    revision = weights_revision(str(one))
    assert revision.startswith("blake3:")
    assert weights_revision(str(other)) == revision


@pytest.mark.parametrize(
    "files",
    [{"a": b"1", "b": b"3"}, {"a": b"1"}, {"a": b"1", "c": b"2"}, {"a": b"2", "b": b"1"}, {"a": b"12", "b": b""}],
    ids=["another byte", "a file less", "another name", "swapped", "cut elsewhere"],
)
def test_other_files_are_other_models(make_model: Callable[..., Path], files: dict[str, bytes]) -> None:
    assert weights_revision(str(make_model("one"))) != weights_revision(str(make_model("other", **files)))


def test_weights_in_folders_below_count(make_model: Callable[..., Path]) -> None:
    folder = make_model("one")
    before = weights_revision(str(folder))
    (folder / "part").mkdir()
    (folder / "part" / "c.bin").write_bytes(b"3")
    assert weights_revision(str(folder)) != before


def test_weights_that_change_in_place_are_read_again(make_model: Callable[..., Path]) -> None:
    folder = make_model("one")
    before = weights_revision(str(folder))
    file = folder / "a.safetensors"
    stamp = file.stat()
    file.write_bytes(b"9")
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # as some copying tools do; its inode still tells
    assert weights_revision(str(folder)) != before


def test_what_was_read_once_is_not_read_again(make_model: Callable[..., Path], cache: Path) -> None:
    folder = make_model("one")
    revision = weights_revision(str(folder))
    known = json.loads(cache.read_text())
    assert len(known) == 2
    cache.write_text(json.dumps(dict.fromkeys(known, "f" * 64)))
    assert weights_revision(str(folder)) != revision, "the kept digest was not used"


def test_weights_are_read_by_one_process_while_the_others_wait(make_model: Callable[..., Path], cache: Path) -> None:
    folder = make_model("one")
    revision = weights_revision(str(folder))
    known = dict.fromkeys(json.loads(cache.read_text()), "f" * 64)
    cache.unlink()
    with ThreadPoolExecutor() as pool:
        with cache.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock.fileno(), fcntl.LOCK_EX)
            waiting = pool.submit(weights_revision, str(folder))
            assert not wait([waiting], timeout=0.3).done
            cache.write_text(json.dumps(known))
        assert waiting.result() != revision, "it has read what another process had read meanwhile"


@pytest.mark.parametrize("content", ["", "[]", "{", '{"x": 1}', '{"x": "short"}', "null", "\x00"])
def test_a_spoilt_cache_costs_reading_again(make_model: Callable[..., Path], cache: Path, content: str) -> None:
    folder = make_model("one")
    revision = weights_revision(str(folder))
    cache.write_text(content)
    assert weights_revision(str(folder)) == revision


def test_a_cache_that_cannot_be_written_costs_reading_again(
    make_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("one")
    revision = weights_revision(str(folder))
    (tmp_path / "file").write_text("where a folder should be")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert weights_revision(str(folder)) == revision


def test_a_snapshot_of_a_hub_is_known_by_its_commit_and_not_read(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert weights_revision(str(snapshot)) == f"commit:{COMMIT}"
    assert model_revision(str(snapshot)) == f"commit:{COMMIT}"


@pytest.mark.parametrize("name", [COMMIT, "snapshots/main", f"snapshots/{COMMIT}x", f"snapshots/{COMMIT}/part"])
def test_a_folder_that_is_only_named_like_a_commit_is_read(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir(parents=True)
    (folder / "a.safetensors").write_bytes(b"1")
    assert weights_revision(str(folder)).startswith("blake3:")


def test_a_single_file_is_a_model(tmp_path: Path) -> None:
    for name, content in (("one", b"1"), ("same", b"1"), ("other", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.gguf").write_bytes(content)
    one, same, other = (weights_revision(str(tmp_path / name / "model.gguf")) for name in ("one", "same", "other"))
    assert one == same != other


@pytest.mark.parametrize("name", ["empty", "nowhere/else"])
def test_a_model_without_weights_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgumentError, match="model"):
        weights_revision(str(tmp_path / name))


def test_a_models_settings_count_where_its_folder_is_all_that_is_known(make_model: Callable[..., Path]) -> None:
    def revision(config: dict[str, object] | None) -> str:
        if config is not None:
            (folder / "config.json").write_text(json.dumps(config))
        return model_revision(str(folder))

    folder = make_model("one")
    plain = revision(None)
    assert plain == weights_revision(str(folder))
    one = revision({"rope_theta": 10_000, "_name_or_path": "a"})
    assert one != plain
    assert revision({"_name_or_path": "b", "rope_theta": 10_000}) == one
    assert revision({"rope_theta": 20_000}) != one


# Adapters.


@pytest.fixture
def make_adapter(tmp_path: Path) -> Callable[..., str]:
    def make(name: str, *, weights: bytes = b"1", config: str = "{}", **others: str) -> str:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "adapter_model.safetensors").write_bytes(weights)
        (folder / "adapter_config.json").write_text(config)
        for other, text in others.items():
            (folder / other).write_text(text)
        return str(folder)

    return make


def test_an_adapter_is_its_weights_and_its_settings_not_its_name(make_adapter: Callable[..., str]) -> None:
    one = adapter_revision(make_adapter("one"))
    assert adapter_revision(make_adapter("copy", notes="not part of it")) == one
    assert adapter_revision(make_adapter("weights", weights=b"2")) != one
    assert adapter_revision(make_adapter("settings", config='{"r": 8}')) != one


def test_an_adapter_that_was_trained_on_in_its_folder_is_another(make_adapter: Callable[..., str]) -> None:
    before = adapter_revision(make_adapter("one"))
    assert adapter_revision(make_adapter("one", weights=b"2")) != before


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="lora_path"):
        adapter_revision(str(tmp_path))


# Settings.


def test_what_cannot_shape_k_and_v_does_not_count_and_all_else_does() -> None:
    plain = settings_digest({"rope_theta": 10_000})
    assert settings_digest({"rope_theta": 10_000, "_name_or_path": "x", "use_cache": False, "dtype": "b"}) == plain
    assert settings_digest({"rope_theta": 10_000, "what_nobody_knows": 1}) != plain


def test_the_order_of_settings_does_not_matter() -> None:
    assert canonical_json({"b": 1, "a": [1, {"d": 2, "c": "é"}]}) == '{"a":[1,{"c":"é","d":2}],"b":1}'
    assert settings_digest({"a": 1, "b": {"x": 1, "y": 2}}) == settings_digest({"b": {"y": 2, "x": 1}, "a": 1})


def test_position_settings_are_told_in_full_as_long_as_they_fit() -> None:
    short = {"theta": 10_000}
    assert position_settings(short) == '{"theta":10000}'
    whole = {"x": "é" * ((STRING_MAX_BYTES - len('{"x":""}')) // 2)}
    assert position_settings(whole) == canonical_json(whole)
    longer = {"x": whole["x"] + "y" * 10}
    assert set(json.loads(position_settings(longer))) == {"blake3"}


def test_a_local_model_is_called_by_its_folder_and_another_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    assert model_label(str(tmp_path / "llama")) == "llama"
    assert model_label(f"{tmp_path / 'llama'}/") == "llama"
    assert model_label("org/model-that-is-nowhere") == "org/model-that-is-nowhere"
