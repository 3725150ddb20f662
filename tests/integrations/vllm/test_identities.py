"""Which namespaces blocks belong to: only what is known for certain is stored or found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace

import pytest

from kvstore.errors import InvalidArgumentError
from kvstore.namespace import NONE, Namespace, Shard
from kvstore_client.integrations._blocks import BlockShape, EngineModel
from kvstore_client.integrations.vllm.identities import Adapter, Identities, Identity
from kvstore_client.integrations.vllm.messages import RankKey, RankLayout
from tests.integrations.vllm.fakes import MODEL, SHAPE, HeldExecutor, InlineExecutor, rank_layout, rank_layouts

ADAPTER = Adapter(name="lora", id=1, path="/adapters/lora")
FIELDS = ("model", "weights_revision", "tokenizer", "rope", "dtype", "num_layers", "num_kv_heads", "head_dim")
FIELDS += ("v_head_dim", "tokens_per_block", "layout", "shard", "lora", "tenant_salt", "k_precision", "v_precision")


def make_identities(
    *,
    model: EngineModel | Exception = MODEL,
    ranks: Mapping[RankKey, RankLayout] | None = None,
    group_settings: list[dict[str, object]] | None = None,
    late_settings: Mapping[str, object] | None = None,
    adapters: Mapping[str, str] | Exception | None = None,
    executor: Executor | None = None,
) -> Identities:
    def make_model() -> EngineModel:
        if isinstance(model, Exception):
            raise model
        return model

    def adapter_revision(path: str) -> str:
        if isinstance(adapters, Exception):
            raise adapters
        return (adapters or {})[path]

    ranks = rank_layouts() if ranks is None else ranks
    group_count = len(next(iter(ranks.values())).shapes)
    identities = Identities(
        make_model=make_model,
        adapter_revision=adapter_revision,
        group_settings=group_settings or [{"attention": f"full:{group}"} for group in range(group_count)],
        late_settings=lambda: late_settings or {},
        executor=executor or InlineExecutor(),
    )
    identities.begin(ranks)
    return identities


def found(identities: Identities, adapter: Adapter | None = None) -> Identity:
    """Adapters are read in the background, so that the first to ask gets nothing."""
    identity = identities.find(adapter) or identities.find(adapter)
    assert identity is not None
    return identity


def only(identity: Identity) -> Namespace:
    ((namespace,),) = identity.namespaces.values()
    assert namespace is not None
    return namespace


def differing(one: Namespace, other: Namespace) -> set[str]:
    return {name for name in FIELDS if getattr(one, name) != getattr(other, name)}


def test_nothing_is_known_before_the_weights_are_read() -> None:
    executor = HeldExecutor()
    identities = make_identities(executor=executor)
    assert identities.find(None) is None
    executor.run()
    assert only(found(identities)).weights_revision == "1"


@pytest.mark.parametrize(
    "error", [InvalidArgumentError("no such model"), OSError("unreadable"), ZeroDivisionError("a fault of ours")]
)
def test_a_model_that_cannot_be_told_is_neither_stored_nor_found_and_the_log_says_so(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    identities = make_identities(model=error)
    assert identities.find(None) is None
    assert identities.find(ADAPTER) is None
    assert "nothing is stored or loaded" in caplog.text
    assert str(error) in caplog.text


def test_a_shape_that_no_namespace_can_tell_is_found_out_before_anything_is_stored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    layout = rank_layout(shape=replace(SHAPE, layout="sideways"))
    assert make_identities(ranks={(0, 0): layout}).find(None) is None
    assert "sideways" in caplog.text


def test_the_same_question_has_the_same_answer() -> None:
    identities = make_identities(adapters={ADAPTER.path: "blake3:a"})
    assert found(identities) is found(identities)
    assert found(identities, ADAPTER) is found(identities, ADAPTER)
    assert found(identities).id != found(identities, ADAPTER).id


def test_an_adapter_is_read_in_the_background_and_once() -> None:
    executor, read = HeldExecutor(), []

    def adapter_revision(path: str) -> str:
        read.append(path)
        return "blake3:a"

    identities = Identities(
        make_model=lambda: MODEL,
        adapter_revision=adapter_revision,
        group_settings=[{}],
        late_settings=dict,
        executor=executor,
    )
    identities.begin(rank_layouts())
    executor.run()
    assert [identities.find(ADAPTER) for _ in range(3)] == [None] * 3
    executor.run()
    assert found(identities, ADAPTER) is found(identities, ADAPTER)
    executor.run()
    assert read == [ADAPTER.path]


def test_an_adapter_is_known_by_its_content_not_by_its_name() -> None:
    copy = Adapter(name="copy", id=2, path="/adapters/copy")
    other = Adapter(name="lora", id=3, path="/adapters/other")
    identities = make_identities(adapters={ADAPTER.path: "blake3:a", copy.path: "blake3:a", other.path: "blake3:b"})
    assert found(identities, copy) is found(identities, ADAPTER)
    assert differing(only(found(identities, ADAPTER)), only(found(identities, other))) == {"lora"}
    assert differing(only(found(identities)), only(found(identities, ADAPTER))) == {"lora"}
    assert only(found(identities)).lora == NONE


def test_an_adapter_that_was_loaded_anew_is_read_anew() -> None:
    content = {ADAPTER.path: "blake3:a"}
    identities = make_identities(adapters=content)
    before = only(found(identities, ADAPTER))
    content[ADAPTER.path] = "blake3:b"
    assert only(found(identities, replace(ADAPTER, id=2))).lora == "blake3:b"
    assert before.lora == "blake3:a"


@pytest.mark.parametrize("error", [InvalidArgumentError("no adapter"), OSError("gone"), ZeroDivisionError("a fault")])
def test_an_adapter_that_cannot_be_read_is_neither_stored_nor_found_and_all_else_goes_on(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    identities = make_identities(adapters=error)
    assert [identities.find(ADAPTER) for _ in range(3)] == [None] * 3
    assert "nothing is stored or loaded for adapter lora" in caplog.text
    assert only(found(identities)).lora == NONE


def test_an_adapter_that_may_be_replaced_in_place_is_neither_stored_nor_found(caplog: pytest.LogCaptureFixture) -> None:
    identities = make_identities(adapters={ADAPTER.path: "blake3:a"})
    assert [identities.find(replace(ADAPTER, is_replaced_in_place=True)) for _ in range(3)] == [None] * 3
    assert caplog.text.count("replaced in place") == 1
    assert only(found(identities, ADAPTER)).lora == "blake3:a"


def test_a_renewed_model_finds_nothing_of_before_and_has_a_number_that_workers_have_not_heard() -> None:
    identities = make_identities(adapters={ADAPTER.path: "blake3:a"})
    before = {found(identities).id: found(identities), found(identities, ADAPTER).id: found(identities, ADAPTER)}
    identities.renew()
    after = [found(identities), found(identities, ADAPTER)]
    assert not {identity.id for identity in after} & before.keys()
    for old, new in zip(before.values(), after, strict=True):
        assert differing(only(old), only(new)) == {"weights_revision"}


def test_no_two_renewals_are_the_same() -> None:
    revisions = set()
    for identities in (make_identities(), make_identities()):
        for _ in range(3):
            identities.renew()
            revisions.add(only(found(identities)).weights_revision)
    assert len(revisions) == 6


def test_each_rank_has_its_own_part_and_ranks_that_share_a_part_share_its_namespace() -> None:
    ranks = {(0, rank): rank_layout(tp_rank=rank // 2, tp_size=2) for rank in range(4)}
    identity = found(make_identities(ranks=ranks))
    namespaces = [identity.namespaces[0, rank][0] for rank in range(4)]
    assert namespaces[0] == namespaces[1]
    assert namespaces[2] == namespaces[3]
    assert namespaces[0] is not None
    assert namespaces[2] is not None
    assert differing(namespaces[0], namespaces[2]) == {"shard"}
    assert list(identity.shards()) == [(namespaces[0],), (namespaces[2],)]


def test_groups_and_stages_differ_by_their_attention_and_their_layers() -> None:
    ranks = {(0, 0): rank_layout(group_count=2)}
    by_layers = found(make_identities(ranks=ranks, group_settings=[{}, {}]))
    by_attention = found(
        make_identities(
            ranks={(0, 0): replace(ranks[0, 0], layers=(("layer.0",), ("layer.0",)))},
            group_settings=[{"attention": "full:0"}, {"attention": "window:8"}],
        )
    )
    for identity in (by_layers, by_attention):
        one, other = identity.namespaces[0, 0]
        assert one is not None
        assert other is not None
        assert differing(one, other) == {"rope"}


def test_what_the_engine_knows_only_later_belongs_to_the_identity() -> None:
    settings: dict[str, object] = {"root": "unknown"}
    identities = make_identities(late_settings=settings)
    settings["root"] = "a"
    one, same, other = (
        only(found(each))
        for each in (
            identities,
            make_identities(late_settings={"root": "a"}),
            make_identities(late_settings={"root": "b"}),
        )
    )
    assert one == same
    assert differing(one, other) == {"rope"}


def test_a_group_that_a_rank_does_not_cache_has_no_namespace() -> None:
    layout = replace(rank_layout(group_count=2), shapes=(None, SHAPE))
    identity = found(make_identities(ranks={(0, 0): layout}))
    assert identity.namespaces[0, 0][0] is None
    assert identity.encoded()[0, 0][0] is None


def test_workers_are_told_what_they_can_decode() -> None:
    identity = found(make_identities(ranks=rank_layouts(rank_count=2, group_count=2)))
    for rank, encoded in identity.encoded().items():
        assert tuple(data and Namespace.decode(data) for data in encoded) == identity.namespaces[rank]


CHANGES: Mapping[str, tuple[Callable[[EngineModel, BlockShape], tuple[EngineModel, BlockShape]], set[str]]] = {
    "model": (lambda model, shape: (replace(model, model="org/other"), shape), {"model"}),
    "revision": (lambda model, shape: (replace(model, weights_revision="2"), shape), {"weights_revision"}),
    "salt": (lambda model, shape: (replace(model, tenant_salt="b"), shape), {"tenant_salt"}),
    "settings": (lambda model, shape: (replace(model, settings={"engine": "other"}), shape), {"rope"}),
    "dtype": (lambda model, shape: (model, replace(shape, dtype="bfloat16")), {"dtype"}),
    "layout": (lambda model, shape: (model, replace(shape, layout="opaque:other")), {"layout"}),
    "layers": (lambda model, shape: (model, replace(shape, num_layers=3)), {"num_layers"}),
    "heads": (lambda model, shape: (model, replace(shape, num_kv_heads=2)), {"num_kv_heads"}),
    "K": (lambda model, shape: (model, replace(shape, head_dim=4)), {"head_dim"}),
    "V": (lambda model, shape: (model, replace(shape, v_head_dim=4)), {"v_head_dim"}),
    "tokens": (lambda model, shape: (model, replace(shape, tokens_per_block=8)), {"tokens_per_block"}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_misses_and_the_field_says_what_it_was(change: str) -> None:
    vary, fields = CHANGES[change]
    model, shape = vary(MODEL, SHAPE)
    one = only(found(make_identities()))
    other = only(found(make_identities(model=model, ranks={(0, 0): rank_layout(shape=shape)})))
    assert one.id != other.id
    assert differing(one, other) == fields


@pytest.mark.parametrize("shard", [Shard(tp_size=2), Shard(tp_rank=1, tp_size=2), Shard(pp_size=2), Shard(dcp_size=2)])
def test_another_part_of_the_model_misses(shard: Shard) -> None:
    one = only(found(make_identities()))
    other = only(found(make_identities(ranks={(0, 0): replace(rank_layout(), shard=shard)})))
    assert one.id != other.id
    assert differing(one, other) == {"shard"}


def test_two_fresh_processes_agree_whatever_their_hash_seed_is() -> None:
    script = (
        "from tests.integrations.vllm.test_identities import *\n"
        "identities = make_identities(\n"
        "    model=replace(MODEL, settings={'b': [1, 2.5], 'a': {'y': None, 'x': True}}, tenant_salt='t'),\n"
        "    ranks=rank_layouts(rank_count=2, group_count=2), adapters={ADAPTER.path: 'blake3:a'})\n"
        "for adapter in (None, ADAPTER):\n"
        "    for namespaces in found(identities, adapter).namespaces.values():\n"
        "        print(*[namespace.id.hex() for namespace in namespaces])\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", script], env={"PYTHONHASHSEED": seed}, stdout=subprocess.PIPE)
        for seed in ("1", "2")
    ]
    told = [process.communicate()[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert told[0] == told[1]
    assert len(set(told[0].split())) == 8  # 2 adapters x 2 ranks x 2 groups
