"""A row of the row engine on a Hopper GPU: the passes of a program over it, and how they load data."""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.parts.hopper.arithmetic import larger, product, quotient, square_root
from pallas_kernels.parts.hopper.row_launch import COLUMN_NUMBERS, Launch, Place, PlaceOf
from pallas_kernels.parts.hopper.strip import Strip
from pallas_kernels.parts.hopper.team import combine_team
from pallas_kernels.parts.hopper.tree import Fold

_BATCH: Final = 8  # strips in flight from memory while results are written


class Row:
    """The current row of a program."""

    def __init__(self, launch: Launch, index: Any, number: Any) -> None:
        self._launch = launch
        self._index = index
        self._number = number
        self._passes = 0
        self._exchanges = 0
        self._held: dict[Any, list[jax.Array]] = {}
        self._derived: dict[Any, list[jax.Array]] = {}
        self._steps: list[tuple[Callable[..., Sequence[jax.Array]], Sequence[int]]] = []
        places = (place for _, place in (*launch.sources, *launch.vectors) if place is not None)
        self._places = {place: place(self) for place in dict.fromkeys(places)}  # in a fixed order, unlike a set

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """Multiplies columns or scalars; rounded, never part of a fused multiply-add."""
        return product(jnp.asarray(a), jnp.asarray(b), self._launch.team.interpret)

    def quotient(self, a: float | jax.Array, b: float | jax.Array) -> jax.Array:
        """Divides two scalars, correctly rounded."""
        return quotient(jnp.float32(a), jnp.float32(b), self._launch.team.interpret)

    def square_root(self, a: jax.Array) -> jax.Array:
        """Takes the square root of a scalar, correctly rounded."""
        return square_root(a, self._launch.team.interpret)

    @property
    def index(self) -> Any:
        """Index of the row."""
        return self._index

    @property
    def interpret(self) -> Any:
        """Whether the interpreter runs the kernel."""
        return self._launch.team.interpret

    def given(self, number: int, column: int = 0) -> jax.Array:
        """Returns one of the row's input scalars."""
        return self._launch.given[number][self._index, column]

    def derive(self, step: Callable[..., Sequence[jax.Array]], *, vectors: Sequence[int] = ()) -> None:
        """Replaces the arrays by the results of a step on every column, for all subsequent passes.

        Rows held in registers are replaced there; for other rows, every pass recomputes the step.

        Args:
            step: Maps float32 arrays of one width, one for each array and each named vector, to any number of arrays.
            vectors: Which vectors to pass to the step.
        """
        self._steps.append((step, vectors))

    def read(self) -> None:
        """Issues all loads of the row, which then stays in registers, before its first column is processed."""
        launch = self._launch
        for block in range(0, launch.columns, launch.lanes):
            place = Place(0, block, None, launch.columns, block + launch.lanes <= launch.columns)
            for i, strip in enumerate(launch.strips(place)):
                self._read(place, i, strip)

    def put(self, number: int, value: jax.Array) -> None:
        """Writes one of the row's scalar results."""

        @self._launch.once
        def _() -> None:
            self._launch.numbers[number][self._index, 0] = value

    def fold(
        self,
        step: Callable[..., Any],
        *,
        combine: Fold | Sequence[Fold] = "add",
        unit: float = 0.0,
        vectors: Sequence[int] = (),
    ) -> Any:
        """Reduces the results of a step over all columns.

        Args:
            step: Maps float32 arrays of one width, one for each array and each named vector, to such an array, or to a
                tuple of them to reduce several in one pass.
            combine: "add", "max" (unspecified if there is a nan), "greatest" (the maximum, propagating nan) or
                "largest" (the same for non-negative numbers); in a tuple only the first two.
            unit: Padding of the last block.
            vectors: Which vectors to pass to the step.

        Returns:
            A float32 scalar, or a tuple of them.
        """
        launch = self._launch
        kinds: tuple[Fold, ...] = (combine,) if isinstance(combine, str) else tuple(combine)

        def take(totals: Any, places: Sequence[Place]) -> Any:
            for place in places:
                found = []
                for i, strip in enumerate(launch.strips(place)):
                    values = step(*self._load(place, i, strip, vectors))
                    values = (values,) if isinstance(combine, str) else tuple(values)
                    values = tuple(strip.mask(v, unit, launch.team.interpret) for v in values)
                    if totals is not None:
                        values = tuple(
                            self._join(kind, t, v) for kind, t, v in zip(kinds, totals[i], values, strict=True)
                        )
                    found.append(values)
                totals = tuple(found)
            return totals

        totals = self._over_pieces(take, None)
        by_kind = [[strip[i] for strip in totals] for i in range(len(kinds))]
        places = [self._place(i) for i in range(len(kinds))]
        self._exchanges += len(kinds)
        if self._last:
            launch.team.release()
        numbers = combine_team(kinds, by_kind, launch.lane, launch.team, places)
        self._leave(met=True)
        return numbers[0] if isinstance(combine, str) else numbers

    def emit(self, step: Callable[..., Sequence[jax.Array]], *, vectors: Sequence[int] | None = None) -> None:
        """Writes the full-width results.

        Args:
            step: Maps float32 arrays of one width, one for each array and each vector, to one array for each result,
                or for each part of a `Parted` result.
            vectors: Which vectors to pass to the step; all by default.
        """
        launch = self._launch
        wanted = range(len(launch.vectors)) if vectors is None else vectors

        def write(carry: None, places: Sequence[Place]) -> None:
            spread = launch.schedule.hold
            strips = [
                (place, i, strip) for place in places for i, strip in enumerate(launch.strips(place, spread=spread))
            ]
            for batch in itertools.batched(strips, _BATCH):
                # The compiler does not move loads across stores, so issue the loads first to overlap them.
                loaded = [self._load(place, i, strip, wanted) for place, i, strip in batch]
                for (place, _, strip), columns in zip(batch, loaded, strict=True):
                    shifted = replace(strip, block=place.column(launch), columns=launch.columns)
                    values = iter(step(*columns))
                    for result, parted in launch.results:
                        for part in range(parted.parts):
                            row, value = parted.row(self._index, part), next(values).astype(result.dtype)
                            shifted.store(result, row, value, launch.team.interpret)

        self._over_pieces(write, None)
        self._leave(met=False)

    def _join(self, kind: Fold, total: jax.Array, value: jax.Array) -> jax.Array:
        if kind in ("greatest", "largest"):
            return larger(total, value, self.interpret)
        return total + value if kind == "add" else jnp.where(total > value, total, value)

    def _place(self, exchange: int) -> Any:
        # With one exchange per row, consecutive rows alternate buffers; with more, exchanges synchronise anyway.
        if self._launch.folds > 1:
            return self._exchanges + exchange
        return self._exchanges + exchange + lax.rem(self._number, 2) * self._launch.exchanges

    def _load(self, place: Place, number: int, strip: Strip, vectors: Sequence[int]) -> list[jax.Array]:
        """Returns a strip of every (derived) array and of some vectors."""
        columns = [
            *self._columns(len(self._steps), place, number, strip),
            *self._vectors(vectors, place, number, strip),
        ]
        return [x.astype(jnp.float32) for x in columns]

    def _columns(self, steps: int, place: Place, number: int, strip: Strip) -> list[jax.Array]:
        """Returns a strip of the columns that the first `steps` steps derive from the arrays."""
        if not steps:
            return self._read(place, number, strip)
        key = (steps, place.piece, place.block, number) if self._launch.schedule.hold else None
        if key is not None and key in self._derived:
            return self._derived[key]
        step, vectors = self._steps[steps - 1]
        given = [*self._columns(steps - 1, place, number, strip), *self._vectors(vectors, place, number, strip)]
        columns = list(step(*(x.astype(jnp.float32) for x in given)))
        if key is not None:
            self._derived[key] = columns
        return columns

    def _read(self, place: Place, number: int, strip: Strip) -> list[jax.Array]:
        """Returns a strip of every array, from registers if it is already held there."""
        launch = self._launch
        key = (place.piece, place.block, number) if launch.schedule.hold else None
        if key is not None and key in self._held:
            return self._held[key]
        if launch.ring:
            columns = [strip.load(array, place.slot, self.interpret) for array in launch.ring]
        else:
            columns = [strip.load(array, self._at_place(at), self.interpret) for array, at in launch.sources]
        if key is not None:
            self._held[key] = columns
        return columns

    def _vectors(self, wanted: Sequence[int], place: Place, number: int, strip: Strip) -> list[jax.Array]:
        return [self._launch.load_vector(v, self._row_of_vector(v), place, number, strip) for v in wanted]

    def _row_of_vector(self, number: int) -> Any:
        return None if number == COLUMN_NUMBERS else self._at_place(self._launch.vectors[number][1], shared=True)

    def _at_place(self, place: PlaceOf | None, *, shared: bool = False) -> Any:
        """Returns the row of an array that this row reads; None for a vector without rows."""
        if place is None:
            return None if shared else self._index
        return self._places[place]

    def _over_pieces(self, visit: Callable[[Any, Sequence[Place]], Any], carry: Any) -> Any:
        """Visits the blocks of the row in ascending order."""
        launch, pieces = self._launch, self._launch.pieces
        self._passes += 1
        if launch.schedule.hold:
            if self._passes == 1 and not launch.ring:
                self.read()
            for piece in range(pieces.count):
                carry = self._over_piece(visit, carry, piece, pieces.last if piece == pieces.count - 1 else pieces.size)
            return carry
        if pieces.count > 1:
            carry = self._over_piece(visit, carry, 0, pieces.size)
            if pieces.count > 2:
                carry = lax.fori_loop(
                    1, pieces.count - 1, lambda i, carry: self._over_piece(visit, carry, i, pieces.size), carry
                )
        return self._over_piece(visit, carry, pieces.count - 1, pieces.last)

    def _over_piece(self, visit: Callable[[Any, Sequence[Place]], Any], carry: Any, piece: Any, columns: int) -> Any:
        launch, lanes = self._launch, self._launch.lanes
        place = functools.partial(Place, piece, slot=self._open(piece), columns=columns)
        whole, unroll = columns // lanes, launch.schedule.unroll
        if launch.schedule.hold:
            unroll = whole + 1
        groups = whole // unroll if whole > unroll else 0

        def group(i: Any, carry: Any) -> Any:
            return visit(carry, [place(block=(i * unroll + j) * lanes, whole=True) for j in range(unroll)])

        begun = 0
        if groups and carry is None:
            carry, begun = group(0, None), 1
        if begun < groups:
            carry = lax.fori_loop(begun, groups, group, carry)
        left = [place(block=j * lanes, whole=True) for j in range(groups * unroll, whole)]
        if columns % lanes:
            left.append(place(block=whole * lanes, whole=False))
        if left:
            carry = visit(carry, left)
        if launch.ring and not launch.kept:
            launch.team.release()
            launch.team.meet()
            launch.fetch(self._at(piece) + launch.schedule.stages)
        return carry

    def _at(self, piece: Any) -> Any:
        """Returns the position of a piece in the sequence of this block's fetches."""
        before = 0 if self._launch.kept else (self._passes - 1) * self._launch.pieces.count
        return self._number * self._launch.fetches + before + piece

    def _open(self, piece: Any) -> Any:
        launch = self._launch
        if not launch.ring:
            return None
        slot = lax.rem(self._at(piece), launch.schedule.stages)
        if self._passes == 1 or not launch.kept:
            plgpu.barrier_wait(launch.barriers.at[slot])
        return slot

    @property
    def _last(self) -> bool:
        """Whether this is the last pass over a row that is entirely in shared memory."""
        launch = self._launch
        return bool(launch.ring) and launch.kept and self._passes == (1 if launch.schedule.hold else launch.passes)

    def _leave(self, met: bool) -> None:
        """Prefetches a later row into this row's stages, if no later pass reads them."""
        launch = self._launch
        if self._last:
            if not met:
                launch.team.release()
                launch.team.meet()
            first = self._at(0) + launch.schedule.stages
            pl.loop(0, launch.pieces.count)(lambda i: launch.fetch(first + i))
