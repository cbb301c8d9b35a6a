"""At most 8 tokens of each sequence, in the order of `MmaDeltaRuleContract`: a block has some columns of a head.

All products are `mma.sync` of tiles of 16 rows: the keys of 8 tokens, and their queries. The state comes while the
block computes the tokens' rows of T and P, of which each warp has some columns. Warps exchange the coefficients of T
and P, and the rows of P. What follows has to do with columns of the state, of which each warp has its own.

A lane has the columns of the state that come after one another as columns of several tiles: column `tiles` * i + j of a
warp is column i of tile j. So loads and stores are wide, and numbers are operands of the next product where they are.
"""

from typing import Any, Final, NamedTuple

from pallas_kernels.delta_rule.hopper.few_form import CHUNK, LANES, STEPS, TILES, Arrays, Form

_LOG2E: Final = 1.4426950408889634
_INF: Final = float("inf")


class Tokens(NamedTuple):
    """What the lanes read of tokens.

    Attributes:
        pairs: Keys and queries as the left operands of 8 products.
        values: The values of the lane's token in its columns, two in a word.
        own: The gate of the lane's token.
        beta: Its beta.
        gates: The gates of all tokens.
    """

    pairs: list[list[Any]]
    values: list[Any]
    own: Any
    beta: Any
    gates: list[Any]


class Rows:
    """Computes the tokens of a sequence that are in one chunk.

    Attributes:
        ops: The operations of lanes, `parts.hopper.lanes.Lanes`.
        form: What the machine code depends on.
        x: The arrays.
        batch: The sequence.
        head: The value head.
        key_head: Its key head.
        part: Which part of the head's columns the block has.
        token: Of the lane, its token in a tile of accumulators; also the column of a right operand.
        quad: Of the lane, twice which its first column in accumulators is, and its first row in a right operand.
        column: First column of the warp in the state.
        state: GPU memory of the head (D, V).
        residual: GPU memory of the head (64, V).
        inverse: GPU memory of the head (64, 64), or packed.
        decay: GPU memory of the head (64,).
        kept_key: GPU memory of the head's keys (64, D).
        known: Whether the state is read; otherwise it is zero.
        done: Tokens before those that are computed now.
        count: How many are computed now.
        here: Row of the chunk that the first of them has; the rows before it are kept.
        valid: Whether the lane's token is computed now.
    """

    state: Any
    residual: Any
    inverse: Any
    decay: Any
    kept_key: Any
    known: Any
    count: Any
    here: Any
    valid: Any

    def __init__(self, ops: Any, arrays: Arrays, form: Form, block: Any) -> None:
        self.ops, self.form, self.x = ops, form, arrays
        pair, self.part = block // form.parts, block % form.parts
        self.batch, self.head = pair // form.value_heads, pair % form.value_heads
        self.key_head = self.head // form.group
        # Of the lane: its token, and the first of its columns or rows of a tile.
        self.token, self.quad = ops.lane // 4, ops.lane % 4
        self.column_of_part = self.part * form.columns
        self.column = self.column_of_part + ops.warp * (8 * form.tiles)
        self.done = ops.number(0)

    def read(self) -> Tokens:
        """Reads tokens from `done` on."""
        form, x = self.form, self.x
        there = self.done + self.token < form.tokens
        own, beta = (self.read_gate(a, self.done + self.token, there) for a in (x.g, x.beta))
        gates = [self.read_gate(x.g, self.done + i, self.done + i < form.tokens) for i in range(form.tokens)]
        return Tokens(self.read_pairs(there), self.read_values(there), own, beta, gates)

    def compute(self, x: Tokens, writes: tuple[Any, Any], first: bool) -> list[list[list[Any]]]:
        """Computes tokens of one chunk.

        Args:
            x: The tokens.
            writes: Whether the block writes T and G of the tokens, and whether it writes their keys.
            first: Whether the state is in GPU memory only.

        Returns:
            The residuals of the chunk as right operands, by tiles.
        """
        ops, form = self.ops, self.form
        self.valid = self.token < self.count
        old_keys = self.read_keys()
        logs, later = self.read_gates(x.gates)
        t = self.read_inverse()
        held = self.of_state(self.numbers_of_state()) if form.held and first else None
        if first and not form.held:
            self.prefetch_residuals()
            self.copy_state()
        square = self.squares(x.pairs)
        self.share_tokens(x.pairs)
        near = [self.chain([0.0] * 4, x.pairs, tile) for tile in old_keys]
        both = None if held is None else [self.chain([0.0] * 4, x.pairs, tile) for tile in held]
        fine = self.is_fine(x, square)
        left, weights = self.coefficients(near, logs, later, ops.select(fine, x.beta, 0.0))
        residuals = self.read_residuals()
        lost, rows = self.solve(left, t)
        weights, lost = self.weigh(weights, t, lost)
        factor = ops.select(fine & ~lost, x.beta, float("nan"))
        self.write_rows(rows, later, square, *writes)
        if both is None:
            ops.await_copies()
            both = self.products()
        grown = ops.power_of_two(later)
        fresh = self.residuals(both, x.values, factor, grown)
        r = self.with_rows(residuals, fresh)
        broken = ops.has_nan([word for tile in r for step in tile for word in step])
        ops.when(broken, lambda: self.outputs(both, weights, r, grown, careful=True))
        ops.when(~broken, lambda: self.outputs(both, weights, r, grown, careful=False))
        return r

    def is_fine(self, x: Tokens, square: Any) -> Any:
        """Returns whether the lane's token is finite, where it has to be."""
        ops = self.ops
        return ops.less(square, _INF) & ops.less(x.own, _INF) & ops.finite(x.beta)

    def of_quad(self, word: Any) -> Any:
        """Returns the bits that are set in some of the four lanes with the same token."""
        for i in range(2):
            other = self.ops.lane + (1 << i) - (self.ops.lane & (1 << i)) * 2
            word = word | self.ops.shuffle(word, other)
        return word

    def of_token(self, array: Any, heads: int, head: Any, size: int, token: Any) -> Any:
        """Returns where a token's row of a head begins."""
        base = self.ops.array(array).far(self.batch, self.form.tokens * heads * size)
        return base.at((token * heads + head) * size)

    def copy_state(self) -> None:
        """Starts to copy the warp's columns of the state to shared memory."""
        ops, form = self.ops, self.form
        chunks = 2 * form.tiles
        rows = LANES // chunks
        row, column = ops.lane // chunks, ops.lane % chunks * 4
        target = row * form.pitch + ops.warp * (8 * form.tiles) + column
        source = self.state.at(row * form.size + self.column + column)
        for i in range(0, form.size, rows):
            ops.copy(target, i * form.pitch, source.at(i * form.size), self.known)

    def numbers_of_state(self) -> list[list[list[Any]]]:
        """Returns the lane's columns of its rows of the state, by steps."""
        ops, form = self.ops, self.form
        place = self.state.at(self.quad * 2 * form.size + self.column + ops.lane // 4 * form.tiles)
        return [
            [ops.load(place.at((16 * step + i) * form.size), form.tiles, self.known, floats=True) for i in (0, 1, 8, 9)]
            for step in range(form.size // 16)
        ]

    def of_state(self, numbers: list[list[list[Any]]]) -> list[list[list[Any]]]:
        """Returns the state as right operands, by tiles."""
        ops = self.ops
        return [
            [[ops.pack(a[j], b[j]), ops.pack(c[j], d[j])] for a, b, c, d in numbers] for j in range(self.form.tiles)
        ]

    def prefetch_residuals(self) -> None:
        """Asks for the residuals that are kept, which are read when there are registers for them."""
        ops, form = self.ops, self.form
        if form.parts == 1:
            first = ops.equal(ops.lane, 0) & ops.equal(ops.warp, 0) & (self.here > 0)
            ops.prefetch(self.residual, self.here * (2 * form.size), first)

    def read_pairs(self, there: Any) -> list[list[Any]]:
        """Returns keys and queries as the left operands of 8 products."""
        ops, form, token = self.ops, self.form, self.done + self.token
        key, query = (
            self.of_token(a, form.key_heads, self.key_head, form.size, token).at(self.quad * 2)
            for a in (self.x.key, self.x.query)
        )
        found = []
        for step in range(form.size // 16):
            places = [a.at(16 * step + 8 * half) for half in range(2) for a in (key, query)]
            found.append([ops.load(p, 1, there)[0] for p in places])
        return found

    def read_keys(self) -> list[list[list[Any]]]:
        """Returns the warp's rows of the chunk's keys as right operands, by tiles."""
        ops, form = self.ops, self.form
        found = []
        for tile in range(TILES):
            row = self.first_row + ops.lane // 4 + 8 * tile
            stored = self.kept_key.at(row * form.size)
            fresh = self.of_token(self.x.key, form.key_heads, self.key_head, form.size, self.done + row - self.here)
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
        """Returns sums to which products are added, one after another."""
        for a, b in zip(left, right, strict=True):
            sums = self.ops.multiply(sums, a, b)
        return sums

    def read_gate(self, array: Any, token: Any, where: Any) -> Any:
        """Reads the gate or beta of a token."""
        place = self.of_token(array, self.form.value_heads, self.head, 1, token)
        return self.ops.load(place, 1, where, floats=True)[0]

    def gate(self, step: Any) -> Any:
        """Returns what a gate adds to G: nothing if it is nan or infinite and positive."""
        ops = self.ops
        gate = ops.product(ops.at_least(step, self.form.least), _LOG2E)
        return ops.select(ops.less(step, _INF), gate, 0.0)

    def read_gates(self, gates: list[Any]) -> tuple[list[list[Any]], Any]:
        """Returns G of the lane's columns of the chunk, and of its token."""
        ops = self.ops
        (now,) = ops.load(self.decay.at(self.here - 1), 1, self.here > 0, floats=True)
        later, sums = ops.real(0.0), []
        logs = []
        for tile in range(TILES):
            column = self.first_row + self.quad * 2 + 8 * tile
            logs.append(ops.load(self.decay.at(column), 2, column < self.here, floats=True))
        for i, step in enumerate(gates):
            there = self.count > i
            now = ops.select(there, ops.sum(now, self.gate(step)), now)
            later = ops.select(ops.equal(self.token, i), now, later)
            sums.append(now)
        later = ops.select(self.valid, later, 0.0)
        for tile in range(TILES):
            for e in range(2):
                column = self.first_row + self.quad * 2 + (8 * tile + e)
                one = logs[tile][e]
                for i, now in enumerate(sums):
                    one = ops.select(ops.equal(column, self.here + i) & (self.count > i), now, one)
                logs[tile][e] = one
        return logs, later

    @property
    def first_row(self) -> Any:
        """The first of the rows of the chunk, or of the columns of T, that the warp has."""
        return self.ops.warp * (8 * TILES)

    def exchange(self, tile: int, words: int) -> Any:
        """Returns where words of one of the warp's tiles of rows go: two tiles are 16 columns of a left operand."""
        ops = self.ops
        number = ops.warp * TILES + tile
        return (number // 2) * (4 * LANES) + ops.lane * 4 + number % 2 * words + self.form.exchanged

    def squares(self, pairs: list[list[Any]]) -> Any:
        """Returns the square of the length of the token's key, as the product of all keys has it."""
        ops = self.ops
        own = self.chain([0.0] * 4, pairs, [[a[0], a[2]] for a in pairs])
        source = self.token * 4 + self.token // 2
        even, odd = (ops.shuffle(x, source) for x in own[:2])
        return ops.select(ops.equal(self.token % 2, 1), odd, even)

    def coefficients(self, near: list[list[Any]], logs: list[list[Any]], later: Any, factor: Any) -> Any:
        """Returns the left operands of T's rows and of P's, of which each warp computes 16 columns."""
        ops = self.ops
        at = self.here + self.token
        for tile in range(TILES):
            lower, upper = [], []
            for e in range(2):
                column = self.first_row + self.quad * 2 + (8 * tile + e)
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
        zero, left, weights = ops.number(0), [], []
        for step in range(STEPS):
            a, b, c, d = ops.load_shared(place, 4, 4 * LANES * step)
            left.append([a, zero, c, zero])
            weights.append([zero, b, zero, d])
        return left, weights

    def read_inverse(self) -> list[list[list[Any]]]:
        """Returns T's rows of the chunk as right operands, by tiles of the warp's columns."""
        ops, found = self.ops, []
        for tile in range(TILES):
            column, words = self.first_row + ops.lane // 4 + 8 * tile, []
            # The place of the lane's first row, in either half of the rows; the others are at constant distances.
            first = self.quad * 2
            bases = [self.inverse.at(self.inverse_place(first + r, column, upper=r == 0)) for r in (0, CHUNK // 2)]
            for step in range(STEPS):
                numbers = []
                for i in (0, 1, 8, 9):
                    at = 16 * step + i
                    row, half = first + at, at // (CHUNK // 2)
                    where = (row < self.here) & (column <= row)
                    place = bases[half].at((at - half * (CHUNK // 2)) * self.row_of_inverse(upper=half == 0))
                    numbers += ops.load(place, 1, where, floats=True)
                words.append(numbers)
            found.append(words)
        return [[[ops.pack(a, b), ops.pack(c, d)] for a, b, c, d in words] for words in found]

    def inverse_place(self, row: Any, column: Any, *, upper: bool) -> Any:
        """Returns the place of an element of T; with slots as `slots.packed`, in one of the halves of the rows."""
        if not self.form.in_slots:
            return row * CHUNK + column
        return (31 - row) * 65 + (64 - column) if upper else (row - 32) * 65 + column

    def row_of_inverse(self, *, upper: bool) -> int:
        """Returns how far apart the rows of T are."""
        if not self.form.in_slots:
            return CHUNK
        return -65 if upper else 65

    def solve(self, left: list[list[Any]], t: list[list[list[Any]]]) -> tuple[Any, list[Any]]:
        """Computes the tokens' rows of T one after another, and puts them into `t`.

        Returns:
            Whether a number of the lane's token is not finite, and the lane's numbers of its row, two in a word.
        """
        ops = self.ops
        lost, rows = ops.true(False), [ops.number(0)] * TILES
        unit = []
        for tile in range(TILES):
            for e in range(2):
                column = self.first_row + self.quad * 2 + (8 * tile + e)
                on = self.valid & ops.equal(column, self.here + self.token)
                unit.append(ops.select(on, ops.real(1.0), 0.0))
        for i in range(self.form.tokens):
            own = ops.equal(self.token, i)
            for tile in range(TILES):
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
        for step in range(STEPS):
            for b in range(2):
                at = self.quad * 2 + (16 * step + 8 * b)
                some = self.count > i
                low, high = ops.equal(at, row) & some, ops.equal(at + 1, row) & some
                operand[step][b] = ops.with_halves(operand[step][b], half, low, high)

    def weigh(self, weights: list[list[Any]], t: list[list[list[Any]]], lost: Any) -> tuple[list[list[Any]], Any]:
        """Returns P as left operands, and whether the lane's token has a row of T that is not finite."""
        ops, shift = self.ops, 4 * STEPS * LANES
        flag = ops.select(lost, 1, ops.number(0))
        for tile in range(TILES):
            p = self.chain([0.0] * 4, weights, t[tile])[2:]
            place = self.exchange(tile, 1) + shift
            ops.store_shared(place, [ops.pack(*(ops.sum(x, 0.0) for x in p))], ops.true())
            ops.store_shared(place + 2, [flag], ops.true())
        ops.barrier()
        place = ops.lane * 4 + (self.form.exchanged + shift)
        zero, found = ops.number(0), []
        flags = zero
        for step in range(STEPS):
            b, d, *bad = ops.load_shared(place, 4, 4 * LANES * step)
            found.append([zero, b, zero, d])
            flags = flags | bad[0] | bad[1]
        return found, self.of_quad(flags) > 0

    def write_rows(self, rows: list[Any], later: Any, square: Any, of_head: Any, of_key: Any) -> None:
        """Adds T, G and keys of the tokens to what is kept."""
        ops, form = self.ops, self.form
        row = self.here + self.token
        writes = self.valid & of_head
        self.write_inverse(rows, row, writes)
        ops.store(self.decay.at(row), [later], writes & ops.equal(ops.warp, 0) & ops.equal(self.quad, 0))
        usable = ops.less(square, _INF)
        place = self.kept_key.at(row * form.size + ops.warp * (16 * TILES) + self.quad * 2)
        for i in range(TILES):
            at = ops.lane * 4 + ops.warp * (4 * TILES * LANES) + form.pairs
            words = ops.load_shared(at, 4, 4 * LANES * i)
            for half in range(2):
                word = ops.select(usable, words[2 * half], 0)
                ops.store(place.at(16 * i + 8 * half), [word], self.valid & of_key)

    def write_inverse(self, rows: list[Any], row: Any, writes: Any) -> None:
        """Adds the tokens' rows of T to what is kept."""
        ops, form = self.ops, self.form
        for tile in range(TILES):
            column = self.first_row + self.quad * 2 + 8 * tile
            numbers = ops.unpack(rows[tile])
            if not form.in_slots:
                ops.store(self.inverse.at(row * CHUNK + column), numbers, writes)
                continue
            for e, number in enumerate(numbers):
                places = [self.inverse_place(row, column + e, upper=upper) for upper in (True, False)]
                place = ops.select(row < CHUNK // 2, *places)
                ops.store(self.inverse.at(place), [number], writes & (column + e <= row))

    def share_tokens(self, pairs: list[list[Any]]) -> None:
        """Writes the operands of keys and queries to shared memory; they are in all warps, and each writes some."""
        ops = self.ops
        for step, words in enumerate(pairs):
            place = ops.lane * 4 + (self.form.pairs + 4 * LANES * step)
            ops.store_shared(place, words, ops.equal(ops.warp, step // TILES))

    def products(self) -> list[list[Any]]:
        """Returns keys and queries times the state, by tiles."""
        ops, form = self.ops, self.form
        place = (self.quad * 2) * form.pitch + ops.warp * (8 * form.tiles) + ops.lane // 4 * form.tiles
        of_pair = ops.lane * 4 + form.pairs

        def two_steps(i: Any, sums: list[Any]) -> list[Any]:
            found = [sums[4 * j : 4 * j + 4] for j in range(form.tiles)]
            at, left = place + i * (32 * form.pitch), of_pair + i * (8 * LANES)
            for step in range(2):
                operand = ops.load_shared(left, 4, 4 * LANES * step)
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

    def read_values(self, there: Any) -> list[Any]:
        """Returns the values of the lane's token in its columns, two in a word."""
        form = self.form
        row = self.of_token(self.x.value, form.value_heads, self.head, form.size, self.done + self.token)
        return self.ops.load(self.own_columns(row), form.tiles, there)

    def read_residuals(self) -> list[list[list[Any]]]:
        """Returns the residuals that are kept, by steps: the lane's columns of its rows, two in a word."""
        ops, form = self.ops, self.form
        column = self.column + ops.lane // 4 * form.tiles
        first, found = self.residual.at(self.quad * 2 * form.size + column), []
        for step in range(STEPS):
            rows = []
            for i in (0, 1, 8, 9):
                place = first.at((16 * step + i) * form.size)
                where = self.is_kept(16 * step + i)
                if form.tiles == 1:
                    rows.append([ops.load_half(place, where)])
                else:
                    rows.append(ops.load(place, form.tiles // 2, where))
            found.append(rows)
        return found

    def is_kept(self, row: int) -> Any:
        """Returns whether a row of the lane is kept."""
        return self.quad * 2 + row < self.here

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

    def with_rows(self, kept: list[list[list[Any]]], fresh: list[Any]) -> list[list[list[Any]]]:
        """Returns the residuals of the chunk as right operands, by tiles: those that are kept, and the tokens' own."""
        ops, form = self.ops, self.form
        place = ops.warp * (32 * form.tiles) + form.exchanged
        ops.store_shared(place + self.token * (4 * form.tiles) + self.quad * form.tiles, fresh, ops.true())
        ops.share()
        words = max(1, form.tiles // 2)
        column = ops.lane // 4 * form.tiles // 2
        rows: list[list[list[Any]]] = []
        for step in range(STEPS):
            rows.append([])
            for at, old in zip((0, 1, 8, 9), kept[step], strict=True):
                token = self.quad * 2 + (16 * step + at) - self.here
                where = (token >= 0) & (token < self.count)
                new = ops.load_shared_where(place + token * (4 * form.tiles) + column, words, where)
                if form.tiles == 1:
                    new = [ops.half_of(new[0], ops.equal(ops.lane // 4 % 2, 1))]
                rows[-1].append([a | b for a, b in zip(old, new, strict=True)])
        return self.operands(rows)

    def operands(self, rows: list[list[list[Any]]]) -> list[list[list[Any]]]:
        """Returns right operands, by tiles, from the lane's columns of its rows."""
        found: list[list[list[Any]]] = [[] for _ in range(self.form.tiles)]
        for step in rows:
            for j in range(self.form.tiles):
                a, b, c, d = (row[j // 2] for row in step)
                join = self.ops.highs if j % 2 else self.ops.lows
                found[j].append([join(a, b), join(c, d)])
        return found

    def outputs(
        self, both: list[list[Any]], weights: list[list[Any]], r: list[list[list[Any]]], grown: Any, *, careful: bool
    ) -> None:
        """Writes the outputs of the tokens.

        Args:
            both: Keys and queries times the state, by tiles.
            weights: P as left operands.
            r: The residuals as right operands, by tiles.
            grown: E(G) of the lane's token.
            careful: Whether a residual may be nan in a row that some token does not see.
        """
        ops, form = self.ops, self.form
        found: list[Any] = [None] * (2 * form.tiles)
        seen = self.seen() if careful else None
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
        row = self.of_token(self.x.out, form.value_heads, self.head, form.size, self.done + self.token)
        ops.store(self.own_columns(row), words, self.valid)

    def seen(self) -> list[list[Any]]:
        """Returns which rows a token sees, as left operands: 1 in the rows of the queries."""
        ops, at, found = self.ops, self.here + self.token, []
        for step in range(STEPS):
            words = []
            for half in range(2):
                column = self.quad * 2 + (16 * step + 8 * half)
                ones = [ops.select(self.valid & (column + e <= at), ops.real(1.0), 0.0) for e in range(2)]
                words.append(ops.pack(*ones))
            found.append([ops.number(0), words[0], ops.number(0), words[1]])
        return found

    def without_nan(self, operand: list[list[Any]]) -> tuple[list[list[Any]], list[list[Any]]]:
        """Returns an operand with zeros for nan, and one with ones there."""
        ops = self.ops
        clean: list[list[Any]] = [[] for _ in operand]
        nans: list[list[Any]] = [[] for _ in operand]
        for at, words in enumerate(operand):
            for word in words:
                numbers = ops.unpack(word)
                broken = [ops.is_nan(x) for x in numbers]
                clean[at].append(ops.pack(*(ops.select(b, 0.0, x) for b, x in zip(broken, numbers, strict=True))))
                nans[at].append(ops.pack(*(ops.select(b, ops.real(1.0), 0.0) for b in broken)))
        return clean, nans
