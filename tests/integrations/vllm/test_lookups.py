"""What the store is asked of a prompt, and what its answers come to."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace

import pytest

from kvstore.errors import UnavailableError
from kvstore.messages import RECOMPUTE_S_MAX
from kvstore.namespace import Namespace
from kvstore_client.integrations.vllm.identities import Identity
from kvstore_client.integrations.vllm.lookups import Found, Lookups
from kvstore_client.integrations.vllm.matching import GroupShape
from kvstore_client.integrations.vllm.messages import IdentityId
from tests.integrations.vllm.fakes import MODEL, SHAPE, FakeStore, HeldExecutor, InlineExecutor, chain, rank_layouts

FULL = GroupShape(kind="full", block_tokens=4)
WIDE = GroupShape(kind="full", block_tokens=8)
WINDOW = GroupShape(kind="window", block_tokens=4, reach_tokens=9)
KEYS = chain(6)


def make_identity(*, rank_count: int = 1, group_count: int = 1) -> Identity:
    namespaces: dict[tuple[int, int], tuple[Namespace | None, ...]] = {
        rank: tuple(
            MODEL.namespace(SHAPE, shard=layout.shard, settings={"group": group}) for group in range(group_count)
        )
        for rank, layout in rank_layouts(rank_count=rank_count, group_count=group_count).items()
    }
    return Identity(id=IdentityId(0), namespaces=namespaces)


def part(identity: Identity, *, rank: int = 0, group: int = 0) -> Namespace:
    namespace = identity.namespaces[0, rank][group]
    assert namespace is not None
    return namespace


def make_lookups(store: FakeStore, groups: Sequence[GroupShape | None], executor: Executor | None = None) -> Lookups:
    return Lookups(store, groups, executor=executor or InlineExecutor(), clock=lambda: 5.0, wait_s=0.3)


def ask(
    store: FakeStore,
    groups: Sequence[GroupShape | None],
    identity: Identity,
    *,
    key_counts: Sequence[int] | None = None,
    recompute_s_per_token: float | None = None,
) -> Found:
    hashes = [KEYS[:count] for count in key_counts or [6] * len(groups)]
    found = make_lookups(store, groups).begin(identity, hashes, recompute_s_per_token=recompute_s_per_token).found()
    assert found is not None
    return found


def marks(found: Found) -> list[str]:
    return ["".join("x" if hit else "." for hit in hits) for hits in found.hits]


def test_there_is_no_answer_until_the_store_has_answered() -> None:
    store, identity, executor = FakeStore(), make_identity(), HeldExecutor()
    store.hold(part(identity), KEYS[:2])
    lookup = make_lookups(store, [FULL], executor).begin(identity, [KEYS], recompute_s_per_token=None)
    assert lookup.began_s == 5.0
    assert lookup.found() is None
    executor.run()
    assert lookup.found() == Found(hits=((True, True, False, False, False, False),))


def test_full_attention_uses_nothing_behind_a_gap() -> None:
    store, identity = FakeStore(), make_identity()
    store.hold(part(identity), [*KEYS[:2], *KEYS[3:]])
    assert marks(ask(store, [FULL], identity)) == ["xx...."]


def test_a_window_may_use_what_is_behind_a_gap() -> None:
    store, identity = FakeStore(), make_identity(group_count=2)
    store.hold(part(identity, group=0), KEYS)
    store.hold(part(identity, group=1), [KEYS[0], *KEYS[3:]])
    assert marks(ask(store, [FULL, WINDOW], identity)) == ["xxxxxx", "x..xxx"]


def test_a_block_that_somebody_is_still_storing_is_no_hit() -> None:
    store, identity = FakeStore(), make_identity(group_count=2)
    for group in range(2):
        store.hold(part(identity, group=group), KEYS)
    store.pending = {KEYS[4]}
    assert marks(ask(store, [FULL, WINDOW], identity)) == ["xxxx..", "xxxx.."]
    assert marks(ask(store, [None, WINDOW], identity, key_counts=[0, 6])) == ["", "xxxx.x"]


def test_a_block_counts_only_where_every_rank_has_its_part() -> None:
    store, identity = FakeStore(), make_identity(rank_count=3, group_count=2)
    for rank, (count, first) in enumerate([(5, 2), (4, 0), (6, 1)]):
        store.hold(part(identity, rank=rank, group=0), KEYS[:count])
        store.hold(part(identity, rank=rank, group=1), KEYS[first:])
    assert marks(ask(store, [FULL, WINDOW], identity)) == ["xxxx..", "..xx.."]


def test_ranks_that_hold_the_same_bytes_are_asked_once() -> None:
    store, identity = FakeStore(), make_identity()
    shared = replace(identity, namespaces={(0, rank): identity.namespaces[0, 0] for rank in range(4)})
    store.hold(part(identity), KEYS)
    assert marks(ask(store, [FULL], shared)) == ["xxxxxx"]
    assert len(store.asked) == 1


def test_groups_that_look_back_at_everything_are_asked_first_and_what_they_lack_is_not_asked() -> None:
    store, identity = FakeStore(), make_identity(group_count=3)
    store.hold(part(identity, group=1), KEYS[:3])
    store.hold(part(identity, group=2), KEYS)
    store.hold(part(identity, group=0), KEYS)
    found = ask(store, [WINDOW, FULL, FULL], identity)
    assert [(asked.namespace, len(asked.hashes)) for asked in store.asked] == [
        (part(identity, group=1), 6),
        (part(identity, group=2), 3),
        (part(identity, group=0), 3),
    ]
    assert marks(found) == ["xxx...", "xxx...", "xxx..."]


def test_blocks_of_another_size_are_asked_as_far_as_the_tokens_reach() -> None:
    store, identity = FakeStore(), make_identity(group_count=2)
    store.hold(part(identity, group=0), KEYS[:3])
    store.hold(part(identity, group=1), KEYS)
    assert marks(ask(store, [FULL, WIDE], identity, key_counts=[6, 3])) == ["xxx...", "x.."]  # 12 tokens


def test_where_the_first_block_is_missing_nothing_more_is_asked() -> None:
    store, identity = FakeStore(), make_identity(rank_count=2, group_count=2)
    store.hold(part(identity, rank=0, group=1), KEYS)
    assert marks(ask(store, [WINDOW, FULL], identity)) == ["......", "......"]
    assert {asked.namespace for asked in store.asked} == {part(identity, rank=rank, group=1) for rank in range(2)}


def test_a_group_that_is_not_cached_is_not_asked() -> None:
    store, identity = FakeStore(), make_identity(group_count=2)
    store.hold(part(identity, group=1), KEYS)
    assert marks(ask(store, [None, FULL], identity, key_counts=[0, 6])) == ["", "xxxxxx"]


def test_a_pipeline_stage_without_layers_of_a_group_has_no_say_in_it() -> None:
    store, identity = FakeStore(), make_identity(rank_count=2, group_count=2)
    uneven = replace(
        identity,
        namespaces={(0, 0): (part(identity, group=0), part(identity, group=1)), (1, 0): (part(identity, rank=1), None)},
    )
    for namespaces in uneven.namespaces.values():
        for namespace in namespaces:
            if namespace is not None:
                store.hold(namespace, KEYS)
    found = ask(store, [FULL, WINDOW], uneven)
    assert found.error is None
    assert marks(found) == ["xxxxxx", "xxxxxx"]


def test_only_what_decides_first_is_waited_for() -> None:
    store, identity = FakeStore(), make_identity(group_count=2)
    store.hold(part(identity, group=0), KEYS)
    ask(store, [FULL, WINDOW], identity)
    assert [asked.wait_s for asked in store.asked] == [0.3, 0.0]


@pytest.mark.parametrize(("s_per_token", "expected"), [(0.01, [0.02, 0.04]), (None, [None, None])])
def test_each_group_may_take_its_part_of_what_computing_takes(
    s_per_token: float | None, expected: list[float | None]
) -> None:
    store, identity = FakeStore(), make_identity(group_count=2)
    store.hold(part(identity, group=0), KEYS)
    ask(store, [FULL, WIDE], identity, recompute_s_per_token=s_per_token)
    assert [asked.recompute_s for asked in store.asked] == expected


def test_an_engine_that_stood_still_for_an_hour_still_asks_what_the_store_accepts() -> None:
    store, identity = FakeStore(), make_identity()
    ask(store, [FULL], identity, recompute_s_per_token=3_600.0)
    assert [asked.recompute_s for asked in store.asked] == [RECOMPUTE_S_MAX]


def test_what_would_come_too_late_is_left_out_and_counted() -> None:
    store, identity = FakeStore(), make_identity(group_count=2)
    store.hold(part(identity, group=0), KEYS)
    store.hold(part(identity, group=1), KEYS)
    store.left_out_behind = 4
    found = ask(store, [FULL, WINDOW], identity)
    assert marks(found) == ["xxxx..", "xxxx.."]
    assert found.left_out_count == 2


def test_only_the_hits_that_come_too_late_are_left_out_of_a_window() -> None:
    store, identity = FakeStore(), make_identity(group_count=2)
    store.hold(part(identity, group=0), KEYS)
    store.hold(part(identity, group=1), [*KEYS[:3], KEYS[5]])
    store.left_out_behind = 1
    window = replace(WINDOW, block_tokens=4)
    found = ask(store, [window], Identity(id=IdentityId(0), namespaces={(0, 0): (part(identity, group=1),)}))
    assert marks(found) == ["x....x"]
    assert found.left_out_count == 2


def test_a_store_that_cannot_be_asked_has_nothing() -> None:
    store, identity = FakeStore(), make_identity(rank_count=2, group_count=2)
    store.hold(part(identity), KEYS)
    store.error = UnavailableError("gone")
    found = ask(store, [FULL, WINDOW], identity)
    assert marks(found) == ["......", "......"]
    assert found.error is store.error
    assert len(store.asked) == 1, "each further question would wait for its own deadline"


def test_a_fault_of_ours_is_an_answer_too(caplog: pytest.LogCaptureFixture) -> None:
    store, identity = FakeStore(), make_identity()
    store.error = ZeroDivisionError("what nobody thought of")
    found = ask(store, [FULL], identity)
    assert marks(found) == ["......"]
    assert "what nobody thought of" in str(found.error)
    assert "broke off" in caplog.text
