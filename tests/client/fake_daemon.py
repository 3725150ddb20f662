"""A daemon inside the test's process that can be told to fail, to hang and to lie."""

from __future__ import annotations

import itertools
import secrets
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import grpc

from kvstore import PROTOCOL_VERSION, wire
from kvstore import messages as m
from kvstore.envelope import verify_block
from kvstore.errors import (
    REASON_METADATA_KEY,
    CorruptBlockError,
    KvstoreError,
    LayoutMismatchError,
    NamespaceUnknownError,
)
from kvstore.frames import ReadFrame, WriteFrame, cut
from kvstore.keys import BlockHash, NamespaceId, split_hashes
from kvstore.messages import (
    BlockState,
    CommitState,
    CutReason,
    Epoch,
    LeaseId,
    OwnerId,
    ReservationId,
    ReserveState,
)
from kvstore.wire import Method, Streams

_METHODS = (
    wire.GET_STORE_INFO,
    wire.GET_STORE_STATS,
    wire.OPEN_NAMESPACE,
    wire.LOOKUP_BLOCKS,
    wire.ACQUIRE_PREFIX,
    wire.RENEW_LEASES,
    wire.RELEASE_LEASES,
    wire.READ_BLOCKS,
    wire.VERIFY_BLOCKS,
    wire.RESERVE_BLOCKS,
    wire.WRITE_BLOCKS,
    wire.COMMIT_BLOCKS,
    wire.ABORT_RESERVATIONS,
    wire.PREFETCH_BLOCKS,
    wire.DESCRIBE_NAMESPACES,
    wire.HINT_BLOCKS,
)
_HANDLERS = {
    Streams.NEITHER: grpc.unary_unary_rpc_method_handler,
    Streams.REQUEST: grpc.stream_unary_rpc_method_handler,
    Streams.RESPONSE: grpc.unary_stream_rpc_method_handler,
}


class _Reservation:
    def __init__(self, key: tuple[NamespaceId, BlockHash], *, owner_id: OwnerId) -> None:
        self.key = key
        self.owner_id = owner_id
        self.data = bytearray()


class FakeDaemon:
    """Honest unless told otherwise. `calls` names every RPC that came in; faults are per RPC name.

    `rewrites[name]` gets the honest response (for ReadBlocks: the list of frames) and returns what is sent instead.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.hints: list[tuple[str, m.Hint]] = []
        """What came with calls, by RPC."""
        self.blocks: dict[tuple[NamespaceId, BlockHash], bytes] = {}
        self.leases: dict[LeaseId, OwnerId] = {}
        self.reservations: dict[ReservationId, _Reservation] = {}
        self.pending: set[BlockHash] = set()
        self.on_disk: set[BlockHash] = set()
        self.nvme: m.NvmeStats | None = None
        self.room_count = 1 << 30
        self.rewrites: dict[str, Callable[[Any], Any]] = {}
        self._failures: dict[str, deque[KvstoreError]] = defaultdict(deque)
        self._arrival = threading.Condition()
        self._gates: dict[str, threading.Event] = {}
        self._payload_bytes: dict[NamespaceId, int] = {}
        self._ids = itertools.count(1)
        self.epoch = Epoch(secrets.token_bytes(16))
        self._server = grpc.server(ThreadPoolExecutor(max_workers=16), options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self._handlers(),))
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        for name in list(self._gates):
            self.resume(name)
        self._server.stop(0).wait()

    def restart(self) -> None:
        """What a client sees of a restart: a new epoch, and everything is forgotten. Ids start again."""
        self.epoch = Epoch(secrets.token_bytes(16))
        self._ids = itertools.count(1)
        for state in (self.blocks, self.leases, self.reservations, self._payload_bytes):
            state.clear()

    def fail(self, method: Method[Any, Any], *errors: KvstoreError) -> None:
        """The next calls of this RPC end with these errors, one each."""
        self._failures[method.name].extend(errors)

    def hang(self, method: Method[Any, Any]) -> None:
        """Calls of this RPC are not answered until `resume`."""
        self._gates.setdefault(method.name, threading.Event())

    def resume(self, name: str) -> None:
        self._gates.pop(name).set()

    def count(self, method: Method[Any, Any]) -> int:
        return self.calls.count(method.name)

    def wait_for_call(self, method: Method[Any, Any], *, count: int) -> None:
        """Returns once this RPC has come in so many times."""
        with self._arrival:
            assert self._arrival.wait_for(lambda: self.count(method) >= count, timeout=20), self.calls

    # --- plumbing

    def _handlers(self) -> grpc.GenericRpcHandler:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        for method in _METHODS:
            behaviour = self._stream_behaviour if method.streams is Streams.RESPONSE else self._behaviour
            handlers[method.name] = _HANDLERS[method.streams](behaviour(method))
        return grpc.method_handlers_generic_handler(wire.STORE_SERVICE, handlers)

    def _behaviour(self, method: Method[Any, Any]) -> Callable[[Any, grpc.ServicerContext], bytes]:
        def handle(data: Any, context: grpc.ServicerContext) -> bytes:
            self._arrive(method, context)
            try:
                if method.streams is Streams.REQUEST:
                    request: Any = map(method.decode_request, data)
                else:
                    request = method.decode_request(data)
                    self.note_hint(method, request)
                response = getattr(self, f"_{method.name}")(request)
            except KvstoreError as error:
                _abort(context, error)
            return method.encode_response(self.rewrites.get(method.name, same)(response))

        return handle

    def _stream_behaviour(self, method: Method[Any, Any]) -> Callable[[Any, grpc.ServicerContext], Iterator[bytes]]:
        def handle(data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
            self._arrive(method, context)
            try:
                request = method.decode_request(data)
                self.note_hint(method, request)
                frames = list(self._ReadBlocks(request))
                for frame in self.rewrites.get(method.name, same)(frames):
                    yield frame if isinstance(frame, bytes) else method.encode_response(frame)
            except KvstoreError as error:
                _abort(context, error)

        return handle

    def _arrive(self, method: Method[Any, Any], context: grpc.ServicerContext) -> None:
        try:
            self.note_arrival(method)
        except KvstoreError as error:
            _abort(context, error)

    def note_arrival(self, method: Method[Any, Any]) -> None:
        """Counts a call, keeps it while its RPC hangs, and raises what it is to end with."""
        with self._arrival:
            self.calls.append(method.name)
            self._arrival.notify_all()
        gate = self._gates.get(method.name)
        if gate is not None:
            gate.wait(30)
        if self._failures[method.name]:
            raise self._failures[method.name].popleft()

    def note_hint(self, method: Method[Any, Any], request: Any) -> None:
        hint = getattr(request, "hint", None)
        if hint is not None:
            with self._arrival:
                self.hints.append((method.name, hint))
                self._arrival.notify_all()

    def wait_for_hint(self, method: str) -> m.Hint:
        """The first that came with such a call."""

        def found() -> list[m.Hint]:
            return [hint for name, hint in self.hints if name == method]

        with self._arrival:
            assert self._arrival.wait_for(found, timeout=20), self.hints
            return found()[0]

    # --- the store, as simply as it can be

    def _GetStoreInfo(self, _: m.GetStoreInfoRequest) -> m.StoreInfo:  # noqa: N802
        return m.StoreInfo(
            version="fake",
            protocol_version=PROTOCOL_VERSION,
            epoch=self.epoch,
            uptime_s=1.0,
            draining=False,
            batch_count_max=m.BATCH_COUNT_MAX,
            frame_data_bytes_max=m.FRAME_DATA_BYTES_MAX,
        )

    def _GetStoreStats(self, _: m.GetStoreStatsRequest) -> m.StoreStats:  # noqa: N802
        zeros = {name: 0 for name in m.StoreStats.__dataclass_fields__ if name.endswith(("_bytes", "_count"))}
        counts = {
            "block_count": len(self.blocks),
            "lease_count": len(self.leases),
            "reservation_count": len(self.reservations),
        }
        return m.StoreStats(**(zeros | counts), uptime_s=1.0, namespaces=(), nvme=self.nvme)

    def _OpenNamespace(self, request: m.OpenNamespaceRequest) -> m.OpenNamespaceResponse:  # noqa: N802
        payload_bytes = request.namespace.block_layout.payload_bytes
        if payload_bytes != request.payload_bytes:
            raise LayoutMismatchError(f"blocks have {payload_bytes} bytes, not {request.payload_bytes}")
        self._payload_bytes[request.namespace.id] = payload_bytes
        return m.OpenNamespaceResponse(namespace_id=request.namespace.id, epoch=self.epoch, slot_bytes=payload_bytes)

    def _LookupBlocks(self, request: m.LookupBlocksRequest) -> m.LookupBlocksResponse:  # noqa: N802
        states = self._states(request.namespace_id, request.block_hashes)
        matched_count, left_out_count = self._matched(request, states)
        return m.LookupBlocksResponse(
            matched_count=matched_count,
            block_states=bytes(states),
            tiers=bytes(len(states)),
            epoch=self.epoch,
            left_out_count=left_out_count,
            cut_reason=CutReason.TOO_SLOW if left_out_count else CutReason.NONE,
        )

    def _AcquirePrefix(self, request: m.AcquirePrefixRequest) -> m.AcquirePrefixResponse:  # noqa: N802
        states = self._states(request.namespace_id, request.block_hashes)
        matched_count, left_out_count = self._matched(request, states)
        lease_id = LeaseId(next(self._ids)) if matched_count else None
        if lease_id is not None:
            self.leases[lease_id] = request.owner_id
        return m.AcquirePrefixResponse(
            matched_count=matched_count,
            block_states=bytes(states),
            tiers=bytes(len(states)),
            epoch=self.epoch,
            lease_id=lease_id,
            left_out_count=left_out_count,
            cut_reason=CutReason.TOO_SLOW if left_out_count else CutReason.NONE,
        )

    def _RenewLeases(self, request: m.RenewLeasesRequest) -> m.RenewLeasesResponse:  # noqa: N802
        return m.RenewLeasesResponse(
            renewed=tuple(self.leases.get(lease) == request.owner_id for lease in request.lease_ids)
        )

    def _ReleaseLeases(self, request: m.ReleaseLeasesRequest) -> m.ReleaseLeasesResponse:  # noqa: N802
        released = []
        for lease in request.lease_ids:
            released.append(self.leases.get(lease) == request.owner_id)
            if released[-1]:
                del self.leases[lease]
        return m.ReleaseLeasesResponse(released=tuple(released))

    def _ReadBlocks(self, request: m.ReadBlocksRequest) -> Iterator[ReadFrame]:  # noqa: N802
        self._check_open(request.namespace_id)
        for index, block_hash in enumerate(split_hashes(request.block_hashes)):
            block = self.blocks.get((request.namespace_id, block_hash))
            if block is None:
                yield ReadFrame(block_index=index, block_state=BlockState.MISS)
                continue
            for offset, length in cut(len(block)):
                yield ReadFrame(
                    block_index=index,
                    block_state=BlockState.HIT,
                    offset_bytes=offset,
                    size_bytes=len(block),
                    data=memoryview(block)[offset : offset + length],
                )

    def _VerifyBlocks(self, request: m.VerifyBlocksRequest) -> m.VerifyBlocksResponse:  # noqa: N802
        return m.VerifyBlocksResponse(block_states=bytes(BlockState.HIT for _ in split_hashes(request.block_hashes)))

    def _CountReads(self, _: m.CountReadsRequest) -> m.CountReadsResponse:  # noqa: N802
        return m.CountReadsResponse()

    def _HintBlocks(self, _: m.HintBlocksRequest) -> m.HintBlocksResponse:  # noqa: N802
        return m.HintBlocksResponse()

    def _TakeAccesses(self, request: m.TakeAccessesRequest) -> m.TakeAccessesResponse:  # noqa: N802
        return m.TakeAccessesResponse(
            accesses=(), last_number=max(request.after_number, 1), dropped_count=0, epoch=self.epoch
        )

    def _DescribeNamespaces(self, _: m.DescribeNamespacesRequest) -> m.DescribeNamespacesResponse:  # noqa: N802
        return m.DescribeNamespacesResponse(namespaces=())

    def _PrefetchBlocks(self, request: m.PrefetchBlocksRequest) -> m.PrefetchBlocksResponse:  # noqa: N802
        self._check_open(request.namespace_id)
        hashes = split_hashes(request.block_hashes)
        stored = [block_hash for block_hash in hashes if (request.namespace_id, block_hash) in self.blocks]
        on_disk = [block_hash for block_hash in stored if block_hash in self.on_disk]
        count_max = (request.budget_bytes or 1 << 62) // self._payload_bytes[request.namespace_id]
        started = on_disk[:count_max]
        self.on_disk.difference_update(started)
        return m.PrefetchBlocksResponse(
            in_memory_count=len(stored) - len(on_disk),
            started_count=len(started),
            refused_count=len(on_disk) - len(started),
            missing_count=len(hashes) - len(stored),
            epoch=self.epoch,
        )

    def _ReserveBlocks(self, request: m.ReserveBlocksRequest) -> m.ReserveBlocksResponse:  # noqa: N802
        self._check_open(request.namespace_id)
        states: list[int] = []
        ids: list[ReservationId | None] = []
        for block_hash in split_hashes(request.block_hashes):
            key = (request.namespace_id, block_hash)
            state = self._reserve_state(key, is_orphan=ReserveState.FULL in states)
            states.append(state)
            ids.append(ReservationId(next(self._ids)) if state == ReserveState.RESERVED else None)
            if ids[-1] is not None:
                self.reservations[ids[-1]] = _Reservation(key, owner_id=request.owner_id)
        return m.ReserveBlocksResponse(reserve_states=bytes(states), reservation_ids=tuple(ids), epoch=self.epoch)

    def _WriteBlocks(self, frames: Iterator[WriteFrame]) -> m.WriteBlocksResponse:  # noqa: N802
        owner_id = None
        landed_bytes = 0
        for frame in frames:
            owner_id = owner_id or frame.owner_id
            reservation = self.reservations.get(frame.reservation_id)
            if reservation is not None and reservation.owner_id == owner_id:
                assert len(reservation.data) == frame.offset_bytes, "frames out of order"
                reservation.data += frame.data
                landed_bytes += len(frame.data)
        return m.WriteBlocksResponse(landed_bytes=landed_bytes)

    def _CommitBlocks(self, request: m.CommitBlocksRequest) -> m.CommitBlocksResponse:  # noqa: N802
        states = []
        for reservation_id in request.reservation_ids:
            reservation = self.reservations.pop(reservation_id, None)
            if reservation is None or reservation.owner_id != request.owner_id:
                states.append(CommitState.EXPIRED)
                continue
            namespace_id, block_hash = reservation.key
            try:
                verify_block(
                    bytes(reservation.data),
                    namespace_id=namespace_id,
                    block_hash=block_hash,
                    payload_bytes=self._payload_bytes[namespace_id],
                )
            except CorruptBlockError:
                states.append(CommitState.CORRUPT)
            else:
                self.blocks[reservation.key] = bytes(reservation.data)
                states.append(CommitState.COMMITTED)
        return m.CommitBlocksResponse(commit_states=bytes(states))

    def _AbortReservations(self, request: m.AbortReservationsRequest) -> m.AbortReservationsResponse:  # noqa: N802
        aborted = [self.reservations.pop(number, None) for number in request.reservation_ids]
        return m.AbortReservationsResponse(aborted_count=sum(item is not None for item in aborted))

    def _check_open(self, namespace_id: NamespaceId) -> None:
        if namespace_id not in self._payload_bytes:
            raise NamespaceUnknownError(f"namespace {namespace_id.hex()[:16]} is not open")

    def _states(self, namespace_id: NamespaceId, packed: bytes) -> list[BlockState]:
        self._check_open(namespace_id)
        return [self._state(namespace_id, block_hash) for block_hash in split_hashes(packed)]

    def _matched(
        self, request: m.LookupBlocksRequest | m.AcquirePrefixRequest, states: list[BlockState]
    ) -> tuple[int, int]:
        """Leading hits to go by, and those left out: recomputing is always sooner than this disk."""
        hit_count = _leading_hits(states)
        if not request.recompute_s_per_block:
            return hit_count, 0
        hits = split_hashes(request.block_hashes)[:hit_count]
        matched_count = next((index for index, found in enumerate(hits) if found in self.on_disk), hit_count)
        return matched_count, hit_count - matched_count

    def _state(self, namespace_id: NamespaceId, block_hash: BlockHash) -> BlockState:
        if (namespace_id, block_hash) in self.blocks:
            return BlockState.HIT
        return BlockState.PENDING if block_hash in self.pending else BlockState.MISS

    def _reserve_state(self, key: tuple[NamespaceId, BlockHash], *, is_orphan: bool) -> ReserveState:
        if key in self.blocks:
            return ReserveState.STORED
        if key[1] in self.pending:
            return ReserveState.PENDING
        if is_orphan:
            return ReserveState.ORPHAN
        if len(self.blocks) + len(self.reservations) >= self.room_count:
            return ReserveState.FULL
        return ReserveState.RESERVED


def _leading_hits(states: list[BlockState]) -> int:
    return len(list(itertools.takewhile(lambda state: state is BlockState.HIT, states)))


def same(response: Any) -> Any:
    return response


def _abort(context: grpc.ServicerContext, error: KvstoreError) -> NoReturn:
    context.set_trailing_metadata(((REASON_METADATA_KEY, error.reason),))
    context.abort(getattr(grpc.StatusCode, error.grpc_status), str(error))
    raise AssertionError("abort returned")
