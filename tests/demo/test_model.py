from __future__ import annotations

from pathlib import Path

import pytest

from gpu_agent.demo import model


@pytest.fixture(autouse=True)
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVSTORE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_model(folder: Path, *, work_dir: Path, report: model.Report) -> None:
    report("converting")
    (work_dir / "big.gguf").write_text("raw")
    folder.mkdir()
    (folder / "config.json").write_text("{}")


def test_a_model_is_converted_once(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    monkeypatch.setattr(model, "_convert", write_model)
    said: list[str] = []
    folder = model.ensure_default_model(said.append)
    assert (folder / "config.json").is_file()
    assert model.ensure_default_model(said.append) == folder
    assert said == ["converting"]
    assert sorted(entry.suffix for entry in cache_dir.iterdir() if entry != folder) == [".lock"]


def test_a_conversion_that_fails_leaves_nothing(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    def fail(folder: Path, *, work_dir: Path, report: model.Report) -> None:
        write_model(folder, work_dir=work_dir, report=report)
        raise OSError("disk full")

    monkeypatch.setattr(model, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        model.ensure_default_model(lambda _: None)
    assert [entry.suffix for entry in cache_dir.iterdir()] == [".lock"]


def test_what_a_killed_conversion_left_is_cleared_by_the_next(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    leftover = cache_dir / f"{model.converted_folder().name}.partial-dead"
    (leftover / "hf").mkdir(parents=True)
    monkeypatch.setattr(model, "_convert", write_model)
    folder = model.ensure_default_model(lambda _: None)
    assert folder.is_dir()
    assert not leftover.exists()


def test_the_cache_follows_the_users_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KVSTORE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.cache_dir() == tmp_path / "kvstore"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model.cache_dir() == Path.home() / ".cache" / "kvstore"
