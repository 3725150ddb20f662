"""Which of SGLang's pages may be shared: all that shapes K and V counts, all that does not is left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore.namespace import Namespace
from kvstore_client.integrations.sglang.identity import HiCacheSettings, Place, read_identity
from kvstore_client.integrations.sglang.pages import PagePool

from .sglang_pools import MambaPoolHost, MHATokenToKVPoolHost, MLATokenToKVPoolHost

CONFIG = {"architectures": ["LlamaForCausalLM"], "rope_theta": 10000.0, "_name_or_path": "/one/path"}


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Server arguments for a model, a draft model, an adapter and KV scales, as files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("model", "draft", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "draft" / "model.safetensors").write_bytes(b"draft")
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"adapter")
    (tmp_path / "scales.json").write_text("{}")
    return {
        "model_path": str(tmp_path / "model"),
        "revision": None,
        "dtype": "auto",
        "kv_cache_dtype": "fp8_e4m3",
        "quantization": None,
        "quantization_param_path": str(tmp_path / "scales.json"),
        "weight_version": "default",
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": str(tmp_path / "draft"),
        "lora_paths": [SimpleNamespace(lora_id="5f3e", lora_path=str(tmp_path / "adapter"))],
        "port": 30000,
        "log_level": "info",
        "max_total_tokens": 4096,
    }


def namespace_of(
    arguments: dict[str, Any],
    *,
    config: dict[str, object] = CONFIG,
    settings: HiCacheSettings = HiCacheSettings(),  # noqa: B008
    place: Place = Place(),  # noqa: B008
    hashes: str = "4636",
    pool: Any = None,
    name: str = "kv",
    tokens_per_page: int = 4,
    since: str = "",
) -> Namespace:
    identity = read_identity(arguments=arguments, config=config, settings=settings, place=place, hashes=hashes)
    pages = PagePool(pool or MHATokenToKVPoolHost(), name=name)
    return replace(identity, since=since).namespace(pages, tokens_per_page=tokens_per_page)


def write(name: str, content: bytes) -> Callable[[dict[str, Any]], None]:
    """Replaces a file beside the model's folder, or in it."""

    def change(arguments: dict[str, Any]) -> None:
        Path(arguments["model_path"], name).resolve().write_bytes(content)

    return change


@pytest.mark.parametrize(
    "change",
    [
        write("model.safetensors", b"other weights"),
        write("../draft/model.safetensors", b"other draft"),
        # The same name, path and id: as after a restart with a retrained adapter.
        write("../adapter/adapter_model.safetensors", b"retrained"),
        write("../adapter/adapter_config.json", b'{"lora_alpha": 32}'),
        write("../scales.json", b'{"k_scale": 2}'),
        lambda arguments: arguments.update(kv_cache_dtype="fp8_e5m2"),
        lambda arguments: arguments.update(quantization="fp8"),
        lambda arguments: arguments.update(weight_version="2"),
        lambda arguments: arguments.update(speculative_algorithm="EAGLE3"),
        lambda arguments: arguments.update(lora_paths=[]),
        lambda arguments: arguments.update(some_new_rope_setting=1),
    ],
    ids=[
        *("weights", "draft", "adapter", "adapter settings", "scales", "kv dtype", "quantization", "version"),
        *("speculation", "no adapter", "a rope setting of tomorrow"),
    ],
)
def test_whatever_shapes_k_and_v_separates_blocks(
    change: Callable[[dict[str, Any]], None], arguments: dict[str, Any]
) -> None:
    before = namespace_of(arguments)
    change(arguments)
    assert namespace_of(arguments).id != before.id


@pytest.mark.parametrize(
    "more",
    [
        {"config": CONFIG | {"rope_theta": 500000.0}},
        {"settings": HiCacheSettings(tenant_salt="tenant 7")},
        {"settings": HiCacheSettings(weights_revision="step 100")},
        {"place": Place(tp_rank=1, tp_size=2)},
        {"place": Place(pp_rank=1, pp_size=2)},
        {"place": Place(cp_rank=1, cp_size=2)},
        {"place": Place(dcp_rank=1, dcp_size=2, tp_size=2)},
        {"hashes": "other"},
        {"pool": MHATokenToKVPoolHost(layout="layer_first")},
        {"name": "draft"},
        {"tokens_per_page": 8},
        {"since": "2@17#1"},
    ],
    ids=["config", "salt", "revision", "tp", "pp", "cp", "dcp", "hashes", "pool", "name", "page", "since"],
)
def test_another_model_part_pool_or_tenant_has_blocks_of_its_own(
    more: dict[str, Any], arguments: dict[str, Any]
) -> None:
    assert namespace_of(arguments, **more).id != namespace_of(arguments).id


def test_how_an_engine_serves_is_nobodys_identity(arguments: dict[str, Any], tmp_path: Path) -> None:
    before = namespace_of(arguments)
    (tmp_path / "elsewhere").mkdir()
    moved = Path(arguments["model_path"]).rename(tmp_path / "elsewhere" / "model")
    others = {"model_path": str(moved), "port": 1, "log_level": "debug", "max_total_tokens": 8192}
    config = CONFIG | {"_name_or_path": "/another/path"}
    assert namespace_of(arguments | others, config=config).id == before.id


def test_ranks_that_hold_the_same_share_it_and_what_is_of_one_rank_is_not_shared(arguments: dict[str, Any]) -> None:
    """Of a model with latent attention all ranks hold the same KV, but parts of a draft's KV and of states."""

    def ids(pool: Any, name: str) -> set[bytes]:
        places = [Place(tp_rank=rank, tp_size=2, is_replicated=True) for rank in (0, 1)]
        return {namespace_of(arguments, place=place, pool=pool, name=name).id for place in places}

    assert len(ids(MLATokenToKVPoolHost(), "kv")) == 1
    assert len(ids(MHATokenToKVPoolHost(), "draft")) == 2
    assert len(ids(MambaPoolHost(), "mamba")) == 2
    alone = namespace_of(arguments, place=Place(is_replicated=True), pool=MLATokenToKVPoolHost())
    assert {alone.id} == ids(MLATokenToKVPoolHost(), "kv"), "an engine with fewer ranks shares, too"


def test_weights_that_cannot_be_found_are_an_error_which_says_what_to_do(arguments: dict[str, Any]) -> None:
    arguments["model_path"] = "org/not-here"
    with pytest.raises(InvalidArgumentError, match=r"org/not-here.*weights_revision"):
        namespace_of(arguments)
    assert namespace_of(arguments, settings=HiCacheSettings(weights_revision="1")).weights_revision == "1"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"adress": "unix:/x"}, r"extra_config\.adress.*address"),
        ({"call_timeout_s": 0}, r"extra_config\.call_timeout_s.*greater than 0"),
        ({"prefill_tokens_per_s": "fast"}, r"extra_config\.prefill_tokens_per_s.*number"),
    ],
)
def test_a_wrong_setting_is_named(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        HiCacheSettings.parse(extra, where="extra_config")
