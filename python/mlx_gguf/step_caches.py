"""mlx-lm's caches while steps write to what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from . import _ext

__all__ = ["are", "lend"]


def are(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether they are the very same objects; modules would compare their arrays."""
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


class _Loan:
    """The arrays of a list of caches, while steps write to them.

    Attributes
    ----------
    stack, history
    position : int
        Of the next token.
    last : array or None
        What the last step gave, on which every reader has to wait.
    """

    __slots__ = ("history", "last", "position", "stack")

    def __init__(self, stack: _ext.Stack, history: _ext.History, position: int):
        self.stack = stack
        self.history = history
        self.position = position
        self.last: mx.array | None = None

    def step(self, caches: Sequence[Any], x: mx.array) -> mx.array | None:
        """The last norm's output, and caches that have the token; None where layers are called."""
        y = _ext.step(self.history, x, self.position, self.last)
        if y is not None:
            self.last = y
            self.position += 1
            for cache in caches:
                if isinstance(cache, KVCache):
                    cache.offset = self.position
        return y


class _Lent:
    """A cache whose arrays are lent: again a plain one once somebody asks for them."""

    _place: tuple[_Loan, int]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _take_back(self).__reduce_ex__(protocol)

    def empty(self) -> bool:
        return False

    @property
    def nbytes(self) -> int:
        loan, layer = self._place
        return loan.history.nbytes(layer)


def _lent(name: str) -> property:
    def get(cache: Any) -> Any:
        return getattr(_take_back(cache), name)

    def put(cache: Any, value: Any) -> None:
        setattr(_take_back(cache), name, value)

    return property(get, put)


class _LentKeys(_Lent, KVCache):
    keys = _lent("keys")
    values = _lent("values")


class _LentArrays(_Lent, ArraysCache):
    cache = _lent("cache")


def _take_back(cache: Any) -> Any:
    loan, layer = cache._place
    first, second = _ext.read_history(loan.history, layer, loan.last)
    del cache._place
    if isinstance(cache, KVCache):
        cache.__class__ = KVCache
        cache.keys, cache.values = first, second
    else:
        cache.__class__ = ArraysCache
        cache.cache = [first, second]
    return cache


def _kind_of(cache: Any) -> type | None:
    """KVCache or ArraysCache, lent or not; None for others and for padded sequences."""
    if type(cache) in (KVCache, _LentKeys):
        return KVCache
    if type(cache) in (ArraysCache, _LentArrays):
        plain = cache.left_padding is None and cache.lengths is None
        return ArraysCache if plain else None
    return None


def lend(stack: _ext.Stack, caches: list[Any]) -> _Loan | None:
    """The loan that all caches are in, or a new one with a copy of their arrays."""
    kinds = [_kind_of(cache) for cache in caches]
    if None in kinds:
        return None
    offsets = {cache.offset for cache in caches if isinstance(cache, KVCache)}
    if len(offsets) != 1:
        return None
    position = offsets.pop()
    if isinstance(caches[0], _Lent):
        loan = caches[0]._place[0]
        places = [(loan, layer) for layer in range(len(caches))]
        if (
            loan.stack is stack
            and position < loan.history.capacity
            and all(
                isinstance(c, _Lent) and c._place == p for c, p in zip(caches, places, strict=True)
            )
        ):
            loan.position = position
            return loan
    return _borrow(stack, caches, position)


def _borrow(stack: _ext.Stack, caches: list[Any], position: int) -> _Loan | None:
    if any(cache.empty() for cache in caches):
        return None
    first: list[mx.array] = []
    second: list[mx.array] = []
    for cache in caches:
        held: Any = (cache.keys, cache.values) if isinstance(cache, KVCache) else cache.cache
        if len(held) != 2 or held[1] is None:
            return None
        first.append(held[0])
        second.append(held[1])
    history = _ext.begin_history(stack, first, second, position)
    if history is None:
        return None
    loan = _Loan(stack, history, position)
    for layer, cache in enumerate(caches):
        if isinstance(cache, KVCache):
            del cache.keys, cache.values
            cache.__class__ = _LentKeys
        else:
            del cache.cache
            cache.__class__ = _LentArrays
        cache._place = (loan, layer)
    return loan
