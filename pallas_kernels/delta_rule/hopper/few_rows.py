"""At most 8 tokens of each sequence, in the order of `MmaDeltaRuleContract`: a block has some columns of a head.

All products are `mma.sync` of tiles of 16 rows: the keys of 8 tokens, and their queries. The state is copied to shared
memory while the block computes the tokens' rows of T and P, 16 columns in each warp. Warps exchange the coefficients of T
and the rows of P. What follows has to do with columns of the state, of which each warp has its own.

A lane has the columns of the state that come after one another as columns of several tiles: column `tiles` * i + j of a
warp is column i of tile j. So loads and stores are wide, and numbers are operands of the next product where they are.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

_C: Final = 64
_FEW: Final = 8
_WARPS: Final = 4
_LANES: Final = 32
_STEPS: Final = 4  # products of a chain over the rows of a chunk
_LOG2E: Final = 1.4426950408889634
_TRIANGLE: Final = 64 * 65 // 2
_INF: Final = float("inf")


@dataclass(frozen=True)
class Form:
    """What the machine code depends on.

    Attributes:
        tokens: Tokens of a sequence in the arrays.
        key_heads: J.
        value_heads: H.
        tiles: Tiles of 8 columns of a warp: 1, 2 or 4.
        in_slots: Whether what is kept is in slots.
        scale: Factor of the outputs.
        least: Smallest gate.
        size: Columns of keys and of values.
    """

    tokens: int
    key_heads: int
    value_heads: int
    tiles: int
    in_slots: bool
    scale: float
    least: float
    size: int = 128

    @property
    def columns(self) -> int:
        """Columns of a block."""
        return 8 * self.tiles * _WARPS

    @property
    def parts(self) -> int:
        """Blocks of a head."""
        return self.size // self.columns

    @property
    def group(self) -> int:
        """Value heads that share a key head."""
        return self.value_heads // self.key_heads

    @property
    def pitch(self) -> int:
        """Words of a row of the state in shared memory; rows that a warp reads at once have no bank in common."""
        return self.columns + 4

    @property
    def exchanged(self) -> int:
        """Where in shared memory warps exchange words."""
        return self.size * self.pitch

    @property
    def words(self) -> int:
        """Words of shared memory."""
        return self.pairs + self.size // 16 * 4 * _LANES

    @property
    def pairs(self) -> int:
        """Where in shared memory the operands of keys and queries are."""
        return self.exchanged + 8 * _WARPS * _LANES


class Arrays(NamedTuple):
    """Arrays in GPU memory; shapes as for `portable.gated_delta_rule_extend`."""

    query: Any
    key: Any
    value: Any
    g: Any
    beta: Any
    edge: Any
    start: Any
    lengths: Any
    slots: Any
    state: Any
    kept_key: Any
    residual: Any
    inverse: Any
    decay: Any
    out: Any
    new_edge: Any
    turns: Any


class Program:
    """What the lanes of a block compute."""

    def __init__(self, ops: Any, arrays: Arrays, form: Form, sequences: int, block: Any) -> None:
        self.ops, self.form = ops, form
        pair, self.part = block // form.parts, block % form.parts
        self.batch, self.head = pair // form.value_heads, pair % form.value_heads
        self.key_head = self.head // form.group
        self.x = arrays
        self.sequences = sequences
        # Of the lane: its token, and the first of its columns or rows of a tile.
        self.token, self.quad = ops.lane // 4, ops.lane % 4
        self.column = self.part * form.columns + ops.warp * (8 * form.tiles)

    def run(self) -> None:
        """Computes the tokens of the block's sequence."""
        ops, form, x = self.ops, self.form, self.x
        always = ops.true()
        (count,), (edge,), (start,) = (
            ops.load(ops.array(a).at(self.batch), 1, always) for a in (x.lengths, x.edge, x.start)
        )
        here, slot = start - edge, self.batch
        if form.in_slots:
            (slot,) = ops.load(ops.array(x.slots).at(self.batch), 1, always)
        heads, row = form.value_heads, form.size * form.size
        self.state = ops.array(x.state).far(slot * heads + self.head, row)
        self.residual = ops.array(x.residual).far(slot * heads + self.head, _C * form.size)
        inverse = _TRIANGLE if form.in_slots else _C * _C
        self.inverse = ops.array(x.inverse).far(slot * heads + self.head, inverse)
        self.decay = ops.array(x.decay).far(slot * heads + self.head, _C)
        self.kept_key = ops.array(x.kept_key).far(slot * form.key_heads + self.key_head, _C * form.size)
        self.count, self.here = count, here
        self.there, self.valid = self.token < form.tokens, self.token < count
        # What needs neither the number of tokens nor their places is asked for before those are known.
        self.copy_state(edge > 0)
        self.pairs, self.values = self.read_tokens(), self.read_values()
        self.own, self.beta = (self.of_gate(a, self.token, self.there) for a in (x.g, x.beta))
        self.gates = [self.of_gate(x.g, ops.number(i), always) for i in range(form.tokens)]
        self.new_edges(edge)
        ops.when((count > 0) & (here + count <= _C), self.compute)
        self.write_nothing()

    def new_edges(self, edge: Any) -> None:
        ops, x, form = self.ops, self.x, self.form
        first = ops.equal(ops.lane, 0) & ops.equal(ops.warp, 0) & ops.equal(self.part, 0)
        passed = ops.select(self.count > 0, (self.here + self.count - 1) & -_C, ops.number(0))
        ops.store(ops.array(x.new_edge).at(self.batch), [edge + passed], first & ops.equal(self.head, 0))
        of_head = self.batch * form.value_heads + self.head
        ops.store(ops.array(x.turns).at(of_head), [ops.number(0)], first)
        of_key = self.batch * form.key_heads + self.key_head + self.sequences * form.value_heads
        ops.store(ops.array(x.turns).at(of_key), [ops.number(0)], first)

    def of_token(self, array: Any, heads: int, head: Any, size: int, token: Any) -> Any:
        """Returns where a token's row of a head begins."""
        base = self.ops.array(array).far(self.batch, self.form.tokens * heads * size)
        return base.at((token * heads + head) * size)

    def compute(self) -> None:
        """Computes tokens of one chunk."""
        ops, keys_and_queries = self.ops, self.pairs
        old_keys = self.read_keys()
        logs, later = self.read_gates()
        t = self.read_inverse()
        square = self.squares(keys_and_queries)
        self.share_tokens(keys_and_queries)
        near = [self.chain([0.0] * 4, keys_and_queries, tile) for tile in old_keys]
        fine, factor = self.factors(square)
        left, weights = self.coefficients(near, logs, later, factor)
        residuals = self.read_residuals()
        lost, rows = self.solve(left, t)
        weights, lost = self.weigh(weights, t, lost)
        factor = ops.select(fine & ~lost, factor, float("nan"))
        self.write_rows(rows, later, square)
        ops.await_copies()
        both = self.products()
        grown = ops.power_of_two(later)
        fresh = self.residuals(both, self.values, factor, grown)
        r = self.with_rows(residuals, fresh)
        self.outputs(both, weights, r, grown)

    def copy_state(self, known: Any) -> None:
        ops, form = self.ops, self.form
        chunks = 2 * form.tiles
        rows = _LANES // chunks
        row, column = ops.lane // chunks, ops.lane % chunks * 4
        target = row * form.pitch + ops.warp * (8 * form.tiles) + column
        source = self.state.at(row * form.size + self.column + column)
        where = known & (self.count > 0) if form.in_slots else ops.true()
        for i in range(0, form.size, rows):
            ops.copy(target, i * form.pitch, source.at(i * form.size), where)

    def read_tokens(self) -> list[list[Any]]:
        """Returns keys and queries as the left operands of 8 products."""
        ops, form = self.ops, self.form
        key, query = (
            self.of_token(a, form.key_heads, self.key_head, form.size, self.token).at(self.quad * 2)
            for a in (self.x.key, self.x.query)
        )
        found = []
        for step in range(form.size // 16):
            places = [a.at(16 * step + 8 * half) for half in range(2) for a in (key, query)]
            found.append([ops.load(p, 1, self.there)[0] for p in places])
        return found

    def read_keys(self) -> list[list[list[Any]]]:
        """Returns 16 rows of the chunk's keys as right operands, for two tiles of 8."""
        ops, form = self.ops, self.form
        found = []
        for tile in range(2):
            row = ops.warp * 16 + ops.lane // 4 + 8 * tile
            stored = self.kept_key.at(row * form.size)
            fresh = self.of_token(self.x.key, form.key_heads, self.key_head, form.size, row - self.here)
            place = ops.select(row < self.here, stored, fresh).at(self.quad * 2)
            where = row < self.here + self.count
            found.append(
                [
                    [ops.load(place.at(16 * step + 8 * half), 1, where)[0] for half in range(2)]
                    for step in range(form.size // 16)
                ]
            )
        return found

    def chain(self, sums: list[Any], left: list[list[Any]], right: list[list[Any]]) -> list[Any]:
        for a, b in zip(left, right, strict=True):
            sums = self.ops.multiply(sums, a, b)
        return sums

    def of_gate(self, array: Any, token: Any, where: Any) -> Any:
        """Reads the gate or beta of a token."""
        place = self.of_token(array, self.form.value_heads, self.head, 1, token)
        return self.ops.load(place, 1, where, floats=True)[0]

    def gate(self, step: Any) -> Any:
        ops = self.ops
        gate = ops.product(ops.at_least(step, self.form.least), _LOG2E)
        return ops.select(ops.less(step, _INF), gate, 0.0)

    def read_gates(self) -> tuple[list[list[Any]], Any]:
        """Returns G of the lane's columns of the chunk, and of its token."""
        ops = self.ops
        (now,) = ops.load(self.decay.at(self.here - 1), 1, self.here > 0, floats=True)
        later, sums = ops.real(0.0), []
        logs = []
        for tile in range(2):
            column = ops.warp * 16 + self.quad * 2 + 8 * tile
            logs.append(ops.load(self.decay.at(column), 2, column < self.here, floats=True))
        for i, step in enumerate(self.gates):
            there = self.count > i
            now = ops.select(there, ops.sum(now, self.gate(step)), now)
            later = ops.select(ops.equal(self.token, i), now, later)
            sums.append(now)
        later = ops.select(self.valid, later, 0.0)
        for tile in range(2):
            for e in range(2):
                column = ops.warp * 16 + self.quad * 2 + (8 * tile + e)
                one = logs[tile][e]
                for i, now in enumerate(sums):
                    one = ops.select(ops.equal(column, self.here + i) & (self.count > i), now, one)
                logs[tile][e] = one
        return logs, later

    def squares(self, pairs: list[list[Any]]) -> Any:
        """Returns the square of the length of the token's key, as the product of all keys has it."""
        ops = self.ops
        own = self.chain([0.0] * 4, pairs, [[a[0], a[2]] for a in pairs])
        source = self.token * 4 + self.token // 2
        even, odd = (ops.shuffle(x, source) for x in own[:2])
        return ops.select(ops.equal(self.token % 2, 1), odd, even)

    def factors(self, square: Any) -> tuple[Any, Any]:
        ops = self.ops
        fine = ops.less(square, _INF) & ops.less(self.own, _INF) & ops.finite(self.beta)
        return fine, ops.select(fine, self.beta, 0.0)

    def coefficients(self, near: list[list[Any]], logs: list[list[Any]], later: Any, factor: Any) -> Any:
        """Returns the left operands of T's rows and of P's, of which each warp computes 16 columns."""
        ops = self.ops
        at, words = self.here + self.token, []
        for tile in range(2):
            lower, upper = [], []
            for e in range(2):
                column = ops.warp * 16 + self.quad * 2 + (8 * tile + e)
                seen = self.valid & (column <= at)
                age = ops.power_of_two(ops.select(seen, ops.difference(later, logs[tile][e]), 0.0))
                key, query = near[tile][e], near[tile][2 + e]
                below = self.valid & (column < at) & ops.finite(key)
                a = ops.product(factor, ops.product(key, age))
                lower.append(ops.negative(ops.select(below, a, 0.0)))
                upper.append(ops.select(seen, ops.product(query, age), 0.0))
            words += [ops.pack(*lower), ops.pack(*upper)]
        place = ops.lane * 4 + self.form.exchanged
        ops.store_shared(place + ops.warp * (4 * _LANES), words, ops.true())
        ops.barrier()
        zero, left, weights = ops.number(0), [], []
        for step in range(_STEPS):
            a, b, c, d = ops.load_shared(place, 4, 4 * _LANES * step)
            left.append([a, zero, c, zero])
            weights.append([zero, b, zero, d])
        return left, weights

    def read_inverse(self) -> list[list[list[Any]]]:
        """Returns T's rows of the chunk as right operands, for two tiles of the warp's 16 columns."""
        ops, form, found = self.ops, self.form, []
        for tile in range(2):
            column, words = ops.warp * 16 + ops.lane // 4 + 8 * tile, []
            # The place of the lane's first row, in either half of the rows; the others are at constant distances.
            first = self.quad * 2
            bases = [self.inverse.at(self.inverse_place(first + r, column, upper=r == 0)) for r in (0, _C // 2)]
            for step in range(_STEPS):
                numbers = []
                for i in (0, 1, 8, 9):
                    at = 16 * step + i
                    row, half = first + at, at // (_C // 2)
                    where = (row < self.here) & (column <= row)
                    place = bases[half].at((at - half * (_C // 2)) * self.row_of_inverse(upper=half == 0))
                    numbers += ops.load(place, 1, where, floats=True)
                words.append(numbers)
            found.append(words)
        return [[[ops.pack(a, b), ops.pack(c, d)] for a, b, c, d in words] for words in found]

    def inverse_place(self, row: Any, column: Any, *, upper: bool) -> Any:
        """Returns the place of an element of T; with slots as `slots.packed`, in the upper or lower half of the rows."""
        if not self.form.in_slots:
            return row * _C + column
        return (31 - row) * 65 + (64 - column) if upper else (row - 32) * 65 + column

    def row_of_inverse(self, *, upper: bool) -> int:
        """Returns how far apart the rows of T are."""
        if not self.form.in_slots:
            return _C
        return -65 if upper else 65

    def solve(self, left: list[list[Any]], t: list[list[list[Any]]]) -> tuple[Any, list[Any]]:
        """Computes the tokens' rows of T one after another, and puts them into `t`.

        Returns:
            Whether a number of the lane's token is not finite, and the lane's numbers of its row, two in a word.
        """
        ops = self.ops
        lost, rows = ops.true(False), [ops.number(0)] * 2
        unit = []
        for tile in range(2):
            for e in range(2):
                column = ops.warp * 16 + self.quad * 2 + (8 * tile + e)
                on = self.valid & ops.equal(column, self.here + self.token)
                unit.append(ops.select(on, ops.real(1.0), 0.0))
        for i in range(self.form.tokens):
            own = ops.equal(self.token, i)
            for tile in range(2):
                raw = self.chain([*unit[2 * tile : 2 * tile + 2], 0.0, 0.0], left, t[tile])
                numbers = ops.unpack(ops.pack(raw[0], raw[1]))
                finite = [ops.finite(x) for x in numbers]
                lost = lost | (own & ~(finite[0] & finite[1]))
                word = ops.pack(*(ops.select(f, x, 0.0) for f, x in zip(finite, numbers, strict=True)))
                rows[tile] = ops.select(own, word, rows[tile])
                self.insert(t[tile], word, i)
        return lost & self.valid, rows

    def insert(self, operand: list[list[Any]], word: Any, i: int) -> None:
        """Puts a row, of which this is the accumulator's word, into a right operand, as the row of token i."""
        ops = self.ops
        half = ops.half_of(ops.shuffle(word, ops.lane // 8 + 4 * i), ops.equal(self.token % 2, 1))
        row = self.here + i
        for step in range(_STEPS):
            for b in range(2):
                at = self.quad * 2 + (16 * step + 8 * b)
                some = self.count > i
                low, high = ops.equal(at, row) & some, ops.equal(at + 1, row) & some
                operand[step][b] = ops.with_halves(operand[step][b], half, low, high)

    def weigh(self, weights: list[list[Any]], t: list[list[list[Any]]], lost: Any) -> tuple[list[list[Any]], Any]:
        """Returns P as left operands, and whether the lane's token has a row of T that is not finite."""
        ops, words = self.ops, []
        for tile in range(2):
            p = self.chain([0.0] * 4, weights, t[tile])[2:]
            words.append(ops.pack(*(ops.sum(x, 0.0) for x in p)))
        flag = ops.select(lost, 1, ops.number(0))
        place = ops.lane * 4 + (self.form.exchanged + 4 * _WARPS * _LANES)
        ops.store_shared(place + ops.warp * (4 * _LANES), [*words, flag, flag], ops.true())
        ops.barrier()
        zero, found = ops.number(0), []
        flags = zero
        for step in range(_STEPS):
            b, d, bad, _ = ops.load_shared(place, 4, 4 * _LANES * step)
            found.append([zero, b, zero, d])
            flags = flags | bad
        for i in range(2):
            flags = flags | ops.shuffle(flags, ops.lane + (1 << i) - (ops.lane & (1 << i)) * 2)
        return found, flags > 0

    def write_rows(self, rows: list[Any], later: Any, square: Any) -> None:
        """Adds T, G and keys of the tokens to what is kept."""
        ops, form = self.ops, self.form
        row, first = self.here + self.token, ops.equal(self.part, 0)
        writes = self.valid & first
        for tile in range(2):
            column = ops.warp * 16 + self.quad * 2 + 8 * tile
            numbers = ops.unpack(rows[tile])
            if not form.in_slots:
                ops.store(self.inverse.at(row * _C + column), numbers, writes)
                continue
            for e, number in enumerate(numbers):
                places = [self.inverse_place(row, column + e, upper=upper) for upper in (True, False)]
                place = ops.select(row < _C // 2, *places)
                ops.store(self.inverse.at(place), [number], writes & (column + e <= row))
        ops.store(self.decay.at(row), [later], writes & ops.equal(ops.warp, 0) & ops.equal(self.quad, 0))
        last = ops.equal(self.head % form.group, form.group - 1)
        usable = ops.less(square, _INF)
        place = self.kept_key.at(row * form.size + ops.warp * 32 + self.quad * 2)
        for i in range(2):
            words = ops.load_shared(ops.lane * 4 + ops.warp * (8 * _LANES) + form.pairs, 4, 4 * _LANES * i)
            for half in range(2):
                word = ops.select(usable, words[2 * half], 0)
                ops.store(place.at(16 * i + 8 * half), [word], writes & last)

    def share_tokens(self, pairs: list[list[Any]]) -> None:
        """Writes the operands of keys and queries to shared memory; they are in all warps, and each writes some."""
        ops = self.ops
        for step, words in enumerate(pairs):
            place = ops.lane * 4 + (self.form.pairs + 4 * _LANES * step)
            ops.store_shared(place, words, ops.equal(ops.warp, step // 2))

    def products(self) -> list[list[Any]]:
        """Returns keys and queries times the state, by tiles."""
        ops, form = self.ops, self.form
        place = (self.quad * 2) * form.pitch + ops.warp * (8 * form.tiles) + ops.lane // 4 * form.tiles
        of_pair = ops.lane * 4 + form.pairs

        def two_steps(i: Any, sums: list[Any]) -> list[Any]:
            found = [sums[4 * j : 4 * j + 4] for j in range(form.tiles)]
            at, left = place + i * (32 * form.pitch), of_pair + i * (8 * _LANES)
            for step in range(2):
                operand = ops.load_shared(left, 4, 4 * _LANES * step)
                rows = [
                    ops.load_shared(at, form.tiles, (16 * step + r) * form.pitch, floats=True) for r in (0, 1, 8, 9)
                ]
                for j in range(form.tiles):
                    a, b, c, d = (row[j] for row in rows)
                    found[j] = ops.multiply(found[j], operand, [ops.pack(a, b), ops.pack(c, d)])
            return [x for tile in found for x in tile]

        sums = ops.repeat(form.size // 32, [0.0] * (4 * form.tiles), two_steps)
        return [sums[4 * j : 4 * j + 4] for j in range(form.tiles)]

    def own_columns(self, base: Any) -> Any:
        """Returns where the columns of the lane begin in a row of accumulators."""
        return base.at(self.column + self.quad * (2 * self.form.tiles))

    def read_values(self) -> list[Any]:
        """Returns the values of the lane's token in its columns, two in a word."""
        form = self.form
        row = self.of_token(self.x.value, form.value_heads, self.head, form.size, self.token)
        return self.ops.load(self.own_columns(row), form.tiles, self.there)

    def read_residuals(self) -> list[list[list[Any]]]:
        """Returns the residuals that are kept as right operands, by tiles."""
        ops, form = self.ops, self.form
        column = self.column + ops.lane // 4 * form.tiles
        first = self.residual.at(self.quad * 2 * form.size + column)
        found: list[list[list[Any]]] = [[] for _ in range(form.tiles)]
        for step in range(_STEPS):
            rows = []
            for i in (0, 1, 8, 9):
                place = first.at((16 * step + i) * form.size)
                where = self.quad * 2 + (16 * step + i) < self.here
                if form.tiles == 1:
                    rows.append([ops.load_half(place, where)])
                else:
                    rows.append(ops.load(place, form.tiles // 2, where))
            for j in range(form.tiles):
                a, b, c, d = (row[j // 2] for row in rows)
                join = ops.highs if j % 2 else ops.lows
                found[j].append([join(a, b), join(c, d)])
        return found

    def residuals(self, both: list[list[Any]], values: list[Any], factor: Any, grown: Any) -> list[Any]:
        """Returns the residuals of the lane's token in its columns, and writes them; two in a word, by columns."""
        ops, form = self.ops, self.form
        told = [both[j][e] for e in range(2) for j in range(form.tiles)]
        numbers = [x for word in values for x in ops.unpack(word)]
        against, words = ops.negative(grown), []
        for i in range(form.tiles):
            pair = []
            for at in (2 * i, 2 * i + 1):
                pair.append(ops.product(factor, ops.fused(against, told[at], numbers[at])))
            rounded = ops.unpack(ops.pack(*pair))
            words.append(ops.pack(*(ops.select(ops.finite(x), x, float("nan")) for x in rounded)))
        row = self.residual.at((self.here + self.token) * form.size)
        ops.store(self.own_columns(row), words, self.valid)
        return words

    def with_rows(self, r: list[list[list[Any]]], fresh: list[Any]) -> list[list[list[Any]]]:
        """Returns residuals with those of the tokens; columns as right operands have them."""
        ops, tiles = self.ops, self.form.tiles
        for j in range(tiles):
            # Columns j and tiles + j of the lane are the two columns of tile j in an accumulator.
            a, b = j, tiles + j
            join = [ops.half_of(fresh[c // 2], ops.true(bool(c % 2))) for c in (a, b)]
            word = ops.lows(*join)
            for i in range(self.form.tokens):
                self.insert(r[j], word, i)
        return r

    def outputs(self, both: list[list[Any]], weights: list[list[Any]], r: list[list[list[Any]]], grown: Any) -> None:
        """Writes the outputs of the tokens."""
        ops, form = self.ops, self.form
        found: list[Any] = [None] * (2 * form.tiles)
        seen = self.seen() if form.tokens > 1 else None
        for j in range(form.tiles):
            start = [ops.product(grown, x) for x in both[j][2:]]
            right, lost = r[j], None
            if seen is not None:
                right, nans = self.without_nan(r[j])
                lost = self.chain([0.0] * 4, seen, nans)[2:]
            y = self.chain([0.0, 0.0, *start], weights, right)[2:]
            for e in range(2):
                number = ops.sum(ops.product(y[e], form.scale), 0.0)
                if lost is not None:
                    number = ops.select(ops.less(0.0, lost[e]), float("nan"), number)
                found[e * form.tiles + j] = number
        words = [ops.pack(*found[2 * i : 2 * i + 2]) for i in range(form.tiles)]
        row = self.of_token(self.x.out, form.value_heads, self.head, form.size, self.token)
        ops.store(self.own_columns(row), words, self.valid)

    def seen(self) -> list[list[Any]]:
        """Returns which rows a token sees, as left operands: 1 in the rows of the queries."""
        ops, at, found = self.ops, self.here + self.token, []
        for step in range(_STEPS):
            words = []
            for half in range(2):
                column = self.quad * 2 + (16 * step + 8 * half)
                ones = [ops.select(self.valid & (column + e <= at), ops.real(1.0), 0.0) for e in range(2)]
                words.append(ops.pack(*ones))
            found.append([ops.number(0), words[0], ops.number(0), words[1]])
        return found

    def without_nan(self, operand: list[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
        """Returns an operand with zeros for nan, and one with ones there."""
        ops, clean, nans = self.ops, [], []
        for words in operand:
            clean.append([])
            nans.append([])
            for word in words:
                numbers = ops.unpack(word)
                broken = [ops.is_nan(x) for x in numbers]
                clean[-1].append(ops.pack(*(ops.select(b, 0.0, x) for b, x in zip(broken, numbers, strict=True))))
                nans[-1].append(ops.pack(*(ops.select(b, ops.real(1.0), 0.0) for b in broken)))
        return clean, nans

    def write_nothing(self) -> None:
        """Writes zeros for the tokens from the end of the sequence on."""
        ops, form = self.ops, self.form
        row = self.of_token(self.x.out, form.value_heads, self.head, form.size, self.token)
        missing = (self.token >= self.count) & (self.token < form.tokens)
        ops.store(self.own_columns(row), [ops.number(0)] * form.tiles, missing)
