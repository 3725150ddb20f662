"""What the layers of a model keep of each token, or of each sequence, and how they are spread over GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from kvstore.errors import InvalidArgumentError

PARALLEL_MAX = 1024
"""Far above any real number of GPUs that serve one copy of a model."""
_NODE_GPUS = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """Keeps K and V of each token, or of the last `window_tokens` alone.

    A latent cache (MLA) is one KV head without V: `head_dim` is that of the latent and the shared RoPE part together.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    window_tokens: int | None = None
    index_bytes: int = 0
    """Of each token beside K and V, for a sparse attention's index; in a precision of its own."""

    def token_bytes(self, element_bytes: int) -> int:
        return self.num_kv_heads * (self.head_dim + self.v_head_dim) * element_bytes + self.index_bytes

    def kept_tokens(self, tokens: int) -> int:
        """Of a sequence of so many tokens, those that the next one still looks at."""
        return tokens if self.window_tokens is None else min(tokens, self.window_tokens)

    def shard(self, tp: int) -> AttentionLayer:
        """What one of `tp` GPUs keeps; KV heads that are fewer than the GPUs are kept several times."""
        if self.num_kv_heads % tp and tp % self.num_kv_heads:
            allowed = f"a divisor or a multiple of the model's {self.num_kv_heads} KV heads"
            raise InvalidArgumentError.of("--tp", tp, allowed)
        return replace(self, num_kv_heads=max(self.num_kv_heads // tp, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLayer:
    """Keeps one state of fixed size for each sequence, however long (Mamba, linear attention)."""

    recurrent_elements: int
    recurrent_element_bytes: int
    conv_elements: int
    """In the precision of the KV cache."""

    def sequence_bytes(self, element_bytes: int) -> int:
        return self.recurrent_elements * self.recurrent_element_bytes + self.conv_elements * element_bytes

    def shard(self, tp: int) -> StateLayer:
        return replace(
            self,
            recurrent_elements=-(-self.recurrent_elements // tp),
            conv_elements=-(-self.conv_elements // tp),
        )


Layer = AttentionLayer | StateLayer


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """The KV cache of a model, or of the part of it that one GPU has: its layers in order, at least one.

    Layers without a cache of their own are not in it. `element_bytes` is of K and V.
    """

    layers: tuple[Layer, ...]
    element_bytes: int

    def __post_init__(self) -> None:
        assert self.layers, "a model without layers"

    @cached_property
    def attention(self) -> tuple[AttentionLayer, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, AttentionLayer))

    @cached_property
    def window_tokens(self) -> int | None:
        """The longest window; None: no layer has one."""
        return max((layer.window_tokens for layer in self.attention if layer.window_tokens is not None), default=None)

    @cached_property
    def full_token_bytes(self) -> int:
        """Of one token, in the layers that keep all tokens: what each further token of a long sequence adds."""
        return self._token_bytes([layer for layer in self.attention if layer.window_tokens is None])

    @cached_property
    def window_token_bytes(self) -> int:
        """Of one token, in the layers that keep a window."""
        return self._token_bytes([layer for layer in self.attention if layer.window_tokens is not None])

    @property
    def token_bytes(self) -> int:
        return self.full_token_bytes + self.window_token_bytes

    @cached_property
    def state_bytes(self) -> int:
        """Of one sequence, whatever its length."""
        return sum(layer.sequence_bytes(self.element_bytes) for layer in self.layers if isinstance(layer, StateLayer))

    def sequence_bytes(self, tokens: int) -> int:
        """What a sequence of so many tokens needs to go on. Never falls with more tokens."""
        kept = sum(layer.kept_tokens(tokens) * layer.token_bytes(self.element_bytes) for layer in self.attention)
        return kept + self.state_bytes

    def stored_bytes(self, tokens: int) -> int:
        """What is stored while so many tokens are computed: all layers of each, also behind their windows."""
        return tokens * self.token_bytes + self.state_bytes

    def _token_bytes(self, layers: Sequence[AttentionLayer]) -> int:
        return sum(layer.token_bytes(self.element_bytes) for layer in layers)


def check_tensor_parallel(shape: CacheShape, *, num_heads: int | None, tp: int) -> None:
    """Raises where the heads of some layer cannot be shared out evenly over `tp` GPUs, as engines refuse it."""
    if num_heads is not None and num_heads % tp:
        raise InvalidArgumentError.of("--tp", tp, f"a divisor of the model's {num_heads} attention heads")
    for layer in shape.layers:
        layer.shard(tp)


def fewest_gpus(shape: CacheShape, *, num_heads: int | None, weights_bytes: int, usable_bytes: int) -> tuple[int, int]:
    """`tp` and `pp` of as few GPUs as have room for the weights: up to a node of 8 by `tp`, and more by `pp`.

    (1, 1) where no number of them does.
    """
    needed_count = -(-weights_bytes // usable_bytes)
    tp = 1
    for wider in _NODE_GPUS:
        if tp >= needed_count:
            break
        if _can_share(shape, num_heads=num_heads, tp=wider):
            tp = wider
    pp = -(-needed_count // tp)
    return (tp, pp) if pp <= min(len(shape.layers), PARALLEL_MAX) else (1, 1)


def _can_share(shape: CacheShape, *, num_heads: int | None, tp: int) -> bool:
    try:
        check_tensor_parallel(shape, num_heads=num_heads, tp=tp)
    except InvalidArgumentError:
        return False
    return True


def shards(shape: CacheShape, *, tp: int, pp: int) -> tuple[CacheShape, ...]:
    """What one GPU of each pipeline stage has; the `tp` GPUs of a stage have equally much.

    Stages are as even as can be, the first ones have the layers that are left over.
    """
    layer_count = len(shape.layers)
    if not 1 <= tp <= PARALLEL_MAX:
        raise InvalidArgumentError.of("--tp", tp, f"1 to {PARALLEL_MAX}")
    if not 1 <= pp <= layer_count:
        raise InvalidArgumentError.of("--pp", pp, f"1 to {layer_count}, the number of layers with a cache")
    each, left_over = divmod(layer_count, pp)
    stages, start = [], 0
    for stage in range(pp):
        end = start + each + (stage < left_over)
        layers = tuple(layer.shard(tp) for layer in shape.layers[start:end])
        stages.append(CacheShape(layers=layers, element_bytes=shape.element_bytes))
        start = end
    return tuple(stages)
