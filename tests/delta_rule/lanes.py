"""The operations of `pallas_kernels.parts.hopper.lanes` in NumPy: each warp of a block is a thread of Python."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

_ALL = np.ones(32, bool)


def _f(x: Any) -> np.ndarray:
    x = np.broadcast_to(np.asarray(x, np.float32), (32,))
    return x


def _halves(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    w = _w(x)
    return (w << 16).astype(np.uint32).view(np.float32), (w & np.uint32(0xFFFF0000)).view(np.float32)


def _w(x: Any) -> np.ndarray:
    return np.broadcast_to(np.asarray(x), (32,)).astype(np.int64).astype(np.uint32)


class Address:
    def __init__(self, array: np.ndarray, place: Any) -> None:
        self.array, self.place = array, np.broadcast_to(np.asarray(place, np.int64), (32,))

    def at(self, elements: Any) -> "Address":
        return Address(self.array, self.place + elements)

    def far(self, index: Any, elements: int) -> "Address":
        return Address(self.array, self.place + np.asarray(index, np.int64) * elements)


class Chosen:
    def __init__(self, where: Any, a: Any, b: Any) -> None:
        self.where, self.a, self.b = np.broadcast_to(where, (32,)), a, b

    def at(self, elements: Any) -> "Chosen":
        return Chosen(self.where, self.a.at(elements), self.b.at(elements))


class Lanes:
    def __init__(self, warp: int, shared: np.ndarray, barrier: threading.Barrier) -> None:
        self.lane, self.warp = np.arange(32, dtype=np.int32), np.int32(warp)
        self._shared, self._barrier = shared, barrier

    def array(self, x: np.ndarray) -> Address:
        return Address(x.reshape(-1), 0)

    def number(self, value: int) -> Any:
        return np.int32(value)

    def real(self, value: float) -> Any:
        return np.float32(value)

    def true(self, value: bool = True) -> Any:
        return np.bool_(value)

    def equal(self, a: Any, b: Any) -> Any:
        return np.equal(a, b)

    def select(self, where: Any, a: Any, b: Any) -> Any:
        if isinstance(a, Address):
            return Chosen(where, a, b)
        floats = any(np.asarray(x).dtype == np.float32 for x in (a, b))
        return np.where(where, *(np.asarray(x, np.float32 if floats else np.int64) for x in (a, b)))

    def less(self, a: Any, b: Any) -> Any:
        return _f(a) < _f(b)

    def finite(self, a: Any) -> Any:
        return np.isfinite(_f(a))

    def is_nan(self, a: Any) -> Any:
        return np.isnan(_f(a))

    def product(self, a: Any, b: Any) -> Any:
        return _f(a) * _f(b)

    def sum(self, a: Any, b: Any) -> Any:
        return _f(a) + _f(b)

    def difference(self, a: Any, b: Any) -> Any:
        return _f(a) - _f(b)

    def fused(self, a: Any, b: Any, c: Any) -> Any:
        return (_f(a).astype(np.float64) * _f(b) + _f(c)).astype(np.float32)

    def negative(self, a: Any) -> Any:
        return -_f(a)

    def at_least(self, a: Any, least: float) -> Any:
        return np.fmax(_f(a), np.float32(least))

    def power_of_two(self, a: Any) -> Any:
        return np.exp2(_f(a))

    def pack(self, low: Any, high: Any) -> Any:
        a, b = (_f(x).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32) for x in (low, high))
        return a | (b << 16)

    def unpack(self, word: Any) -> Any:
        return _halves(word)

    def lows(self, a: Any, b: Any) -> Any:
        return (_w(a) & 0xFFFF) | (_w(b) << 16)

    def highs(self, a: Any, b: Any) -> Any:
        return (_w(a) >> 16) | (_w(b) & np.uint32(0xFFFF0000))

    def with_halves(self, word: Any, half: Any, low: Any, high: Any) -> Any:
        w, h = _w(word), _w(half) & 0xFFFF
        w = np.where(low, (w & np.uint32(0xFFFF0000)) | h, w)
        return np.where(high, (w & 0xFFFF) | (h << 16), w).astype(np.uint32)

    def half_of(self, word: Any, upper: Any) -> Any:
        return np.where(upper, _w(word) >> 16, _w(word) & 0xFFFF)

    def shuffle(self, x: Any, source: Any) -> Any:
        return np.broadcast_to(x, (32,))[np.broadcast_to(source, (32,))]

    def has_nan(self, words: Sequence[Any]) -> Any:
        return np.any([~np.isfinite(half) for word in words for half in _halves(word)])

    def any(self, x: Any) -> Any:
        return np.any(x)

    def multiply(self, sums: Sequence[Any], left: Sequence[Any], right: Sequence[Any]) -> list[Any]:
        row, quad = self.lane // 4, self.lane % 4
        a, b, c = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32), np.zeros((16, 8), np.float32)
        for i, word in enumerate(left):
            for e, x in enumerate(_halves(word)):
                a[row + 8 * (i % 2), quad * 2 + e + 8 * (i // 2)] = x
        for i, word in enumerate(right):
            for e, x in enumerate(_halves(word)):
                b[quad * 2 + e + 8 * i, row] = x
        for i, x in enumerate(sums):
            c[row + 8 * (i // 2), quad * 2 + i % 2] = _f(x)
        with np.errstate(all="ignore"):
            for k in range(16):
                c = c + a[:, k, None] * b[k]
        return [c[row + 8 * (i // 2), quad * 2 + i % 2] for i in range(4)]

    def _bytes(self, place: Any, size: int, where: Any) -> np.ndarray:
        """(32, size) bytes."""
        where = np.broadcast_to(where, (32,))
        if isinstance(place, Chosen):
            a = self._bytes(place.a, size, where & place.where)
            return np.where(place.where[:, None], a, self._bytes(place.b, size, where & ~place.where))
        raw, width = place.array.view(np.uint8), place.array.itemsize
        at = (place.place * width)[:, None] + np.arange(size)
        assert (at[where] >= 0).all(), "outside of the array"
        assert (at[where] < raw.size).all(), "outside of the array"
        assert (at[where, 0] % size == 0).all(), "not aligned"
        return np.where(where[:, None], raw[np.where(where[:, None], at, 0)], np.uint8(0))

    def pinned(self, numbers: Any) -> Any:
        return numbers

    def load(self, place: Any, count: int, where: Any, *, floats: bool = False) -> list[Any]:
        found = np.ascontiguousarray(self._bytes(place, 4 * count, where))
        return list(found.view(np.float32 if floats else np.int32).T)

    def load_half(self, place: Any, where: Any) -> Any:
        return np.ascontiguousarray(self._bytes(place, 2, where)).view(np.uint16)[:, 0].astype(np.uint32)

    def _write(self, place: Address, data: np.ndarray, where: Any) -> None:
        where = np.broadcast_to(where, (32,))
        raw, width = place.array.view(np.uint8), place.array.itemsize
        at = (place.place * width)[:, None] + np.arange(data.shape[1])
        assert (at[where] >= 0).all(), "outside of the array"
        assert (at[where] < raw.size).all(), "outside of the array"
        assert (at[where, 0] % data.shape[1] == 0).all(), "not aligned"
        raw[at[where]] = data[where]

    def store(self, place: Address, words: Sequence[Any], where: Any) -> None:
        kinds = [_f(w) if np.asarray(w).dtype == np.float32 else _w(w) for w in words]
        self._write(place, np.stack([k.view(np.uint32) for k in kinds], 1).view(np.uint8), where)

    def prefetch(self, place: Any, size: Any, where: Any) -> None:
        assert (np.asarray(size) % 16 == 0).all()

    def copy(self, target: Any, offset: int, source: Any, where: Any) -> None:
        found = np.ascontiguousarray(self._bytes(source, 16, where)).view(np.uint32)
        self._shared[np.broadcast_to(target + offset, (32,))[:, None] + np.arange(4)] = found

    def copy_where(self, target: Any, offset: int, source: Any, where: Any) -> None:
        where = np.broadcast_to(where, (32,))
        found = np.ascontiguousarray(self._bytes(source, 16, where)).view(np.uint32)
        at = np.broadcast_to(target + offset, (32,))[:, None] + np.arange(4)
        self._shared[at[where]] = found[where]

    def await_copies(self) -> None:
        pass

    def share(self) -> None:
        # The warp's lanes are one array: all of them have written.
        pass

    def load_shared_where(self, place: Any, count: int, where: Any) -> list[Any]:
        found = self.load_shared(np.where(where, place, 0), count)
        return [np.where(where, w, 0) for w in found]

    def load_shared(self, place: Any, count: int, offset: int = 0, *, floats: bool = False) -> list[Any]:
        at = np.broadcast_to(place, (32,)) + offset
        assert (at % count == 0).all(), "not aligned"
        found = self._shared[at[:, None] + np.arange(count)]
        return list(np.ascontiguousarray(found).view(np.float32 if floats else np.int32).T)

    def load_matrices(self, place: Any, offset: int) -> list[Any]:
        row = self._shared[(np.broadcast_to(place, (32,)) + offset)[:, None] + np.arange(4)]
        return [row[8 * m + self.lane // 4, self.lane % 4] for m in range(4)]

    def store_shared(self, place: Any, words: Sequence[Any], where: Any) -> None:
        at, where = np.broadcast_to(place, (32,)), np.broadcast_to(where, (32,))
        for i, w in enumerate(words):
            word = _f(w).view(np.uint32) if np.asarray(w).dtype == np.float32 else _w(w)
            self._shared[(at + i)[where]] = word[where]

    def part(self) -> None:
        pass

    def raise_flag(self, place: Any, word: int) -> None:
        self.store(place, [np.uint32(word)], True)

    def is_raised(self, place: Any, word: int) -> Any:
        return self.equal(self.load(place, 1, True)[0], word)

    def repeat(self, times: int, carried: Sequence[Any], body: Callable[[Any, list[Any]], Sequence[Any]]) -> list[Any]:
        now = list(carried)
        for i in range(times):
            now = list(body(np.int32(i), now))
        return now

    def barrier(self) -> None:
        self._barrier.wait()

    def when(self, condition: Any, body: Callable[[], None]) -> None:
        if np.all(condition):
            body()


def run_blocks(programs: Sequence[Callable[[Lanes], None]], words: int, warps: int = 4) -> None:
    """Runs blocks at the same time.

    Args:
        programs: What each block runs.
        words: Words of shared memory of a block.
        warps: Warps of a block.
    """
    threads, failed = [], []

    def start(program: Callable[[Lanes], None], barrier: threading.Barrier, shared: np.ndarray, warp: int) -> None:
        try:
            program(Lanes(warp, shared, barrier))
        except BaseException as error:
            failed.append(error)
            barrier.abort()

    for program in programs:
        barrier, shared = threading.Barrier(warps), np.full(words, 0x7FC12345, np.uint32)
        threads += [threading.Thread(target=start, args=(program, barrier, shared, w)) for w in range(warps)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
