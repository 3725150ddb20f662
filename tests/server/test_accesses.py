from __future__ import annotations

from kvstore.keys import BlockHash, NamespaceId
from kvstore.messages import ACCESS_BLOCKS_MAX, ACCESS_NUMBER_BYTES, AccessKind
from kvstore_server.core.accesses import WATCH_S, AccessLog
from kvstore_server.core.tenants import ScopedId, Tenant, scoped

SPACE, OTHER = ScopedId(b"one"), ScopedId(b"other")


def log() -> AccessLog:
    return AccessLog(secret=bytes(32))


def hashes(count: int, *, first: int = 0) -> list[BlockHash]:
    return [BlockHash(number.to_bytes(32, "little")) for number in range(first, first + count)]


def note(accesses: AccessLog, count: int, *, at_s: float = 0.0, space: ScopedId = SPACE) -> None:
    accesses.note(space, AccessKind.LOOKUP, hashes(count), matched_count=0, hint=None, uptime_s=at_s)


def test_nothing_is_remembered_of_what_nobody_watches() -> None:
    accesses = log()
    note(accesses, 3)
    assert not accesses.is_watched(SPACE)
    start = accesses.take(SPACE, after_number=0, uptime_s=0.0)
    assert (start.accesses, start.dropped_count) == ((), 0)
    note(accesses, 3, space=OTHER)
    assert accesses.take(SPACE, after_number=start.last_number, uptime_s=0.0).accesses == ()


def test_each_reader_gets_what_came_since_its_last_answer() -> None:
    accesses = log()
    early = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
    note(accesses, 1)
    late = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
    note(accesses, 2)
    for after_number, counts in ((early, [1, 2]), (late, [2])):
        taken = accesses.take(SPACE, after_number=after_number, uptime_s=0.0)
        assert [len(one.block_numbers) // ACCESS_NUMBER_BYTES for one in taken.accesses] == counts
        assert accesses.take(SPACE, after_number=taken.last_number, uptime_s=0.0).accesses == ()


def test_equal_blocks_have_equal_numbers_that_depend_on_the_secret() -> None:
    numbers = []
    for secret in (bytes(32), bytes(32), b"x" * 32):
        accesses = AccessLog(secret=secret)
        start = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
        note(accesses, 2)
        numbers.append(accesses.take(SPACE, after_number=start, uptime_s=0.0).accesses[0].block_numbers)
    assert numbers[0] == numbers[1] != numbers[2]
    assert hashes(2)[0][:ACCESS_NUMBER_BYTES] not in numbers[0]


def test_what_a_slow_reader_does_not_take_is_dropped_and_counted() -> None:
    accesses = log()
    start = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
    for _ in range(10):
        note(accesses, ACCESS_BLOCKS_MAX)
    taken = accesses.take(SPACE, after_number=start, uptime_s=0.0)
    kept = 0
    while taken.accesses:
        assert len(taken.accesses) == 1, "an answer has no more than its most blocks"
        kept += 1
        assert taken.dropped_count == (6 if kept == 1 else 0)
        taken = accesses.take(SPACE, after_number=taken.last_number, uptime_s=0.0)
    assert kept == 4


def test_a_watch_ends_when_nobody_takes_anything_and_the_reader_is_told() -> None:
    accesses = log()
    start = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
    note(accesses, 1, at_s=WATCH_S + 1)
    assert not accesses.is_watched(SPACE)
    again = accesses.take(SPACE, after_number=start, uptime_s=WATCH_S + 2)
    assert (again.accesses, again.dropped_count) == ((), 1)


def test_of_short_accesses_a_bounded_number_is_remembered_and_the_rest_counted() -> None:
    """A hint of one block tells more beside it than its number takes."""
    accesses = log()
    start = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
    for _ in range((1 << 15) + 100):
        note(accesses, 1)
    taken = accesses.take(SPACE, after_number=start, uptime_s=0.0)
    assert taken.dropped_count == 100
    assert len(taken.accesses) == ACCESS_BLOCKS_MAX // 8, "an answer is bounded by what else they tell, too"
    kept = len(taken.accesses)
    while taken.accesses:
        taken = accesses.take(SPACE, after_number=taken.last_number, uptime_s=0.0)
        assert taken.dropped_count == 0
        kept += len(taken.accesses)
    assert kept == 1 << 15


def test_an_access_that_is_larger_than_an_answer_comes_alone_and_whole() -> None:
    accesses = log()
    start = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
    for count in (1, ACCESS_BLOCKS_MAX + 1, 1):
        note(accesses, count)
    counts = []
    taken = accesses.take(SPACE, after_number=start, uptime_s=0.0)
    while taken.accesses:
        counts.append([len(one.block_numbers) // ACCESS_NUMBER_BYTES for one in taken.accesses])
        taken = accesses.take(SPACE, after_number=taken.last_number, uptime_s=0.0)
    assert counts == [[1], [ACCESS_BLOCKS_MAX + 1], [1]]


def test_one_access_beyond_all_that_is_remembered_is_kept_alone() -> None:
    accesses = log()
    start = accesses.take(SPACE, after_number=0, uptime_s=0.0).last_number
    note(accesses, 3)
    note(accesses, (1 << 18) + 1)
    taken = accesses.take(SPACE, after_number=start, uptime_s=0.0)
    assert (len(taken.accesses), taken.dropped_count) == (1, 1)


def test_a_tenant_that_watches_all_it_may_ends_nobody_elses_watch() -> None:
    accesses = AccessLog(secret=bytes(32), tenant_count=4)
    mine = scoped(Tenant("acme"), NamespaceId(bytes(32)))
    accesses.take(mine, after_number=0, uptime_s=0.0)
    others = [scoped(Tenant("greedy"), NamespaceId(bytes([number]) * 32)) for number in range(20)]
    for other in others:
        accesses.take(other, after_number=0, uptime_s=1.0)
    assert accesses.is_watched(mine)
    assert [accesses.is_watched(other) for other in others] == [False] * 16 + [True] * 4, "its share of 16"


def test_so_many_namespaces_are_watched_and_the_one_longest_untaken_gives_way() -> None:
    accesses = log()
    spaces = [ScopedId(bytes([number])) for number in range(17)]
    for at_s, space in enumerate(spaces):
        accesses.take(space, after_number=0, uptime_s=float(at_s))
    assert [accesses.is_watched(space) for space in spaces] == [False] + [True] * 16
