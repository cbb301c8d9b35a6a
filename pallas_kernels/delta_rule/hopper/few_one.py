"""One token of each sequence on Hopper, with fewer instructions and loads than the program for several tokens.

Where blocks are few, a step takes as long as one warp's instructions, one after another. So a lane has two columns of T
that come after one another as columns of two tiles, and loads them at once; a state that is kept in registers is asked
for before all else, and then the chunk's keys come through shared memory; products of two tiles take turns. The rows of
T's and P's coefficients are halves of the same left operands: the other half of each product is not used.
"""

from typing import Any, Final

from pallas_kernels.delta_rule.hopper.few_form import CHUNK, LANES, STEPS, TILES, Form
from pallas_kernels.delta_rule.hopper.few_program import Program
from pallas_kernels.delta_rule.hopper.few_rows import Tokens

_PITCH: Final = 68
"""Words of a row of keys in shared memory; eight rows have no bank in common."""


class OneToken(Program):
    """What the lanes of a block compute, as `Program` does for any number of tokens, of at most one token.

    Attributes:
        asked: Numbers of the state that were asked for before it was known whether there is a token.
    """

    asked: list[list[list[Any]]] | None = None

    def ask(self) -> None:
        """Asks for the state, unless it is in a slot, which has to be known first."""
        if self.form.held and not self.form.in_slots:
            self.asked = self.numbers_of_state()

    def compute(self, x: Tokens, writes: tuple[Any, Any], first: bool) -> list[list[list[Any]]]:
        """Computes the token; see `Rows.compute`."""
        ops, form = self.ops, self.form
        self.valid = self.token < self.count
        shares = form.held and first
        old_keys = None if shares else self.read_keys()
        if shares:
            self.copy_keys()
        logs, later = self.read_gates(x.gates)
        t = self.read_inverse()
        state = (self.asked or self.numbers_of_state()) if shares else None
        if first and not form.held:
            self.prefetch_residuals()
            self.copy_state()
        square = self.squares(x.pairs)
        self.share_tokens(x.pairs)
        both = None
        if state is not None:
            both = ops.pinned(self.chains([[0.0] * 4] * form.tiles, x.pairs, self.of_state(state)))
        near = self.chains([[0.0] * 4] * TILES, x.pairs, old_keys or self.copied_keys())
        fine = self.is_fine(x, square)
        residuals = self.read_residuals() if shares else None
        left = self.shared_coefficients(near, logs, later, ops.select(fine, x.beta, 0.0))
        residuals = residuals or self.read_residuals()
        lost, rows = self.solve(left, t)
        weights, lost = self.weigh(left, t, lost)
        factor = ops.select(fine & ~lost, x.beta, float("nan"))
        self.write_rows(rows, later, square, *writes)
        if both is None:
            ops.await_copies()
            both = self.products()
        grown = ops.power_of_two(later)
        r = self.with_rows(residuals, self.residuals(both, x.values, factor, grown))
        # Every row is seen: an output is nan where a residual is.
        self.outputs(both, weights, r, grown, careful=False)
        return r

    def chains(self, sums: list[list[Any]], left: list[list[Any]], tiles: list[list[list[Any]]]) -> list[list[Any]]:
        """Returns what `chain` does of each tile; their products take turns, as each waits for the one before it."""
        found = list(sums)
        for step, a in enumerate(left):
            found = [self.ops.multiply(one, a, tile[step]) for one, tile in zip(found, tiles, strict=True)]
        return found

    def copy_keys(self) -> None:
        """Starts to copy the warp's rows of the chunk's keys to shared memory; other rows there mean nothing."""
        ops, form = self.ops, self.form
        half, chunk = ops.lane // 16, ops.lane % 16
        first = ops.warp * (8 * TILES * _PITCH) + chunk * 4
        target, stored = first + half * _PITCH, self.kept_key.at((self.first_row + half) * form.size + chunk * 8)
        filled = self.here - self.first_row
        for i in range(0, 8 * TILES, 2):
            ops.copy_where(target, i * _PITCH, stored.at(i * form.size), i < filled - half)
        token = self.of_token(self.x.key, form.key_heads, self.key_head, form.size, self.done + half).at(chunk * 8)
        row = filled + half
        there = (half < self.count) & (row >= 0) & (row < 8 * TILES)
        ops.copy_where(first + row * _PITCH, 0, token, there)

    def copied_keys(self) -> list[list[list[Any]]]:
        """Returns what `copy_keys` has copied as right operands, by tiles."""
        ops = self.ops
        found: list[list[list[Any]]] = [[] for _ in range(TILES)]
        ops.await_copies()
        place = ops.warp * (8 * TILES * _PITCH) + ops.lane % 8 * _PITCH + ops.lane // 8 * 4
        for tile in range(TILES):
            for step in range(0, self.form.size // 16, 2):
                words = ops.load_matrices(place, 8 * tile * _PITCH + 8 * step)
                found[tile] += [words[:2], words[2:]]
        return found

    def read_gates(self, gates: list[Any]) -> tuple[list[list[Any]], Any]:
        """Returns G of the lane's columns of the chunk, and of its token."""
        ops, (gate,) = self.ops, gates
        (now,) = ops.load(self.decay.at(self.here - 1), 1, self.here > 0, floats=True)
        logs = []
        for tile in range(TILES):
            column = self.first_row + self.quad * 2 + 8 * tile
            logs.append(ops.load(self.decay.at(column), 2, column < self.here, floats=True))
        now = ops.select(self.count > 0, ops.sum(now, self.gate(gate)), now)
        later = ops.select(self.valid, ops.select(ops.equal(self.token, 0), now, ops.real(0.0)), 0.0)
        first = self.here - self.first_row - self.quad * 2
        for tile in range(TILES):
            for e in range(2):
                mine = ops.equal(first, 8 * tile + e) & (self.count > 0)
                logs[tile][e] = ops.select(mine, now, logs[tile][e])
        return logs, later

    def shared_coefficients(self, near: list[list[Any]], logs: list[list[Any]], later: Any, factor: Any) -> Any:
        """Returns left operands: the coefficients of T's row above, those of P's below. A warp computes 16 columns."""
        ops = self.ops
        at = self.here + self.token - self.first_row - self.quad * 2
        for tile in range(TILES):
            lower, upper = [], []
            for e in range(2):
                column = 8 * tile + e
                seen = self.valid & (column <= at)
                age = ops.power_of_two(ops.select(seen, ops.difference(later, logs[tile][e]), 0.0))
                key, query = near[tile][e], near[tile][2 + e]
                below = self.valid & (column < at) & ops.finite(key)
                a = ops.product(factor, ops.product(key, age))
                lower.append(ops.negative(ops.select(below, a, 0.0)))
                upper.append(ops.select(seen, ops.product(query, age), 0.0))
            ops.store_shared(self.exchange(tile, 2), [ops.pack(*lower), ops.pack(*upper)], ops.true())
        ops.barrier()
        place = ops.lane * 4 + self.form.exchanged
        return [ops.load_shared(place, 4, 4 * LANES * step) for step in range(STEPS)]

    def read_inverse(self) -> list[list[list[Any]]]:
        """Returns T's rows of the chunk as right operands, by tiles of the warp's columns.

        A lane has two columns after one another, the first one as a column of the first tile.
        """
        ops = self.ops
        found: list[list[list[Any]]] = [[] for _ in range(TILES)]
        first, column = self.quad * 2, self.first_row + ops.lane // 4 * TILES
        filled, diagonal = self.here - first, column - first
        # The place of the lane's first row, in either half of the rows; the others are at constant distances.
        bases = [self.inverse.at(self.inverse_place(first + r, column, upper=r == 0)) for r in (0, CHUNK // 2)]
        for step in range(STEPS):
            rows = []
            for i in (0, 1, 8, 9):
                at = 16 * step + i
                upper = at < CHUNK // 2
                place = bases[not upper].at(at % (CHUNK // 2) * self.row_of_inverse(upper=upper))
                known, right = at < filled, diagonal < at
                if self.form.in_slots:
                    next_column = place.at(-1 if upper else 1)
                    low = ops.load(place, 1, known & (diagonal <= at), floats=True)
                    rows.append(low + ops.load(next_column, 1, known & right, floats=True))
                else:
                    one, other = ops.load(place, 2, known & (diagonal <= at), floats=True)
                    rows.append([one, ops.select(right, other, 0.0)])
            for tile in range(TILES):
                a, b, c, d = (row[tile] for row in rows)
                found[tile].append([ops.pack(a, b), ops.pack(c, d)])
        return found

    @property
    def own_column(self) -> Any:
        """The first of the columns of T that a lane has in accumulators, four after one another: see `read_inverse`."""
        return self.first_row + self.quad * (2 * TILES)

    def solve(self, left: list[list[Any]], t: list[list[list[Any]]]) -> tuple[Any, list[Any]]:
        """Computes the token's row of T, and puts it into `t`; see `Rows.solve`."""
        ops = self.ops
        rows = [ops.number(0)] * TILES
        lost, own, sums = ops.true(False), ops.equal(self.token, 0), []
        distance = self.here + self.token - self.own_column
        for tile in range(TILES):
            on = [self.valid & ops.equal(distance, TILES * e + tile) for e in range(2)]
            sums.append([*(ops.select(one, ops.real(1.0), 0.0) for one in on), 0.0, 0.0])
        for tile, raw in enumerate(self.chains(sums, left, t)):
            numbers = ops.unpack(ops.pack(raw[0], raw[1]))
            finite = [ops.finite(x) for x in numbers]
            lost = lost | (own & ~(finite[0] & finite[1]))
            word = ops.pack(*(ops.select(f, x, 0.0) for f, x in zip(finite, numbers, strict=True)))
            rows[tile] = ops.select(own, word, rows[tile])
            self.insert(t[tile], word, 0)
        return lost & self.valid, rows

    def insert(self, operand: list[list[Any]], word: Any, i: int) -> None:
        """Puts a row, of which this is the accumulator's word, into a right operand, as the row of token i."""
        ops = self.ops
        half = ops.half_of(ops.shuffle(word, ops.lane // 8 + 4 * i), ops.equal(self.token % 2, 1))
        at = self.here + i - self.quad * 2
        # Rows of a word are an even one and the next one.
        half = ops.select(ops.equal(at & 1, 1), half * 0x10000, half)
        pair = ops.select(self.count > i, at & -2, ops.number(-1))
        for step in range(STEPS):
            for b in range(2):
                mine = ops.equal(pair, 16 * step + 8 * b)
                operand[step][b] = operand[step][b] | ops.select(mine, half, ops.number(0))

    def weigh(self, weights: list[list[Any]], t: list[list[list[Any]]], lost: Any) -> tuple[list[list[Any]], Any]:
        """Returns P as the lower half of left operands, and whether the lane's token has a row of T that is not finite.

        A word of the upper half, whose products are not used, says so.
        """
        ops, shift = self.ops, 4 * STEPS * LANES
        flag = ops.select(lost, 1, ops.number(0))
        p = [found[2:] for found in self.chains([[0.0] * 4] * TILES, weights, t)]
        base = self.form.exchanged + shift + ops.warp * (4 * LANES)
        for e in range(2):
            # Columns of a lane of the left operand, in the order of the chunk.
            lane = self.token * 4 + self.quad % 2 * 2 + e
            word = ops.pack(*(ops.sum(tile[e], 0.0) for tile in p))
            ops.store_shared(base + lane * 4 + self.quad // 2 * 2 + 1, [word], ops.true())
        ops.store_shared(base + ops.lane * 4, [flag], ops.true())
        ops.barrier()
        place = ops.lane * 4 + (self.form.exchanged + shift)
        found, flags = [], ops.number(0)
        for step in range(STEPS):
            found.append(ops.load_shared(place, 4, 4 * LANES * step))
            flags = flags | found[-1][0]
        return found, self.of_quad(flags) > 0

    def write_inverse(self, rows: list[Any], row: Any, writes: Any) -> None:
        """Adds the token's row of T to what is kept."""
        ops = self.ops
        numbers = [x for pair in zip(*(ops.unpack(word) for word in rows), strict=True) for x in pair]
        column = self.own_column
        if not self.form.in_slots:
            ops.store(self.inverse.at(row * CHUNK + column), numbers, writes)
            return
        for i, number in enumerate(numbers):
            places = [self.inverse_place(row, column + i, upper=upper) for upper in (True, False)]
            place = ops.select(row < CHUNK // 2, *places)
            ops.store(self.inverse.at(place), [number], writes & (column + i <= row))

    def is_kept(self, row: int) -> Any:
        """Returns whether a row of the lane is kept."""
        return row < self.here - self.quad * 2

    def with_rows(self, kept: list[list[list[Any]]], fresh: list[Any]) -> list[list[list[Any]]]:
        """Returns the residuals of the chunk as right operands, by tiles: those that are kept, and the token's own."""
        ops, form = self.ops, self.form
        place = ops.warp * (32 * form.tiles) + form.exchanged
        ops.store_shared(place + self.token * (4 * form.tiles) + self.quad * form.tiles, fresh, ops.true())
        ops.share()
        one = ops.load_shared(place + ops.lane // 4 * form.tiles // 2, max(1, form.tiles // 2))
        if form.tiles == 1:
            one = [ops.half_of(one[0], ops.equal(ops.lane // 4 % 2, 1))]
        filled = self.here - self.quad * 2
        rows: list[list[list[Any]]] = []
        for step in range(STEPS):
            rows.append([])
            for at, old in zip((0, 1, 8, 9), kept[step], strict=True):
                mine = ops.equal(filled, 16 * step + at)
                rows[-1].append([ops.select(mine, b, a) for a, b in zip(old, one, strict=True)])
        return self.operands(rows)

    def outputs(
        self, both: list[list[Any]], weights: list[list[Any]], r: list[list[list[Any]]], grown: Any, *, careful: bool
    ) -> None:
        """Writes the token's output; see `Rows.outputs`."""
        ops, form = self.ops, self.form
        found: list[Any] = [None] * (2 * form.tiles)
        starts = [[0.0, 0.0, *(ops.product(grown, x) for x in tile[2:])] for tile in both]
        for j, y in enumerate(self.chains(starts, weights, r)):
            for e in range(2):
                found[e * form.tiles + j] = ops.sum(ops.product(y[2 + e], form.scale), 0.0)
        words = [ops.pack(*found[2 * i : 2 * i + 2]) for i in range(form.tiles)]
        row = self.of_token(self.x.out, form.value_heads, self.head, form.size, self.done + self.token)
        ops.store(self.own_columns(row), words, self.valid)


def program_of(form: Form) -> type[Program]:
    """Returns the program that computes what a form says."""
    return OneToken if form.tokens == 1 else Program
