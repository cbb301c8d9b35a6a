"""At most 8 tokens of each sequence on Hopper, also where they are in two chunks."""

from typing import Any, Final

from pallas_kernels.delta_rule.hopper.few_form import CHUNK, STEPS
from pallas_kernels.delta_rule.hopper.few_rows import Rows

_TRIANGLE: Final = CHUNK * (CHUNK + 1) // 2
_READ: Final = 0x7FA57FA5
"""Two bfloat16 numbers that are not numbers, which no instruction computes."""


class Program(Rows):
    """What the lanes of a block compute."""

    def run(self) -> None:
        """Computes the tokens of the block's sequence."""
        ops, form, x = self.ops, self.form, self.x
        always = ops.true()
        (self.count,), (edge,), (start,) = (
            ops.load(ops.array(a).at(self.batch), 1, always) for a in (x.lengths, x.edge, x.start)
        )
        self.here, slot = start - edge, self.batch
        if form.in_slots:
            (slot,) = ops.load(ops.array(x.slots).at(self.batch), 1, always)
        heads, row = form.value_heads, form.size * form.size
        self.state = ops.array(x.state).far(slot * heads + self.head, row)
        self.first_residual = ops.array(x.residual).far(slot * heads, CHUNK * form.size)
        self.residual = self.first_residual.far(self.head, CHUNK * form.size)
        inverse = _TRIANGLE if form.in_slots else CHUNK * CHUNK
        self.inverse = ops.array(x.inverse).far(slot * heads + self.head, inverse)
        self.decay = ops.array(x.decay).far(slot * heads + self.head, CHUNK)
        self.kept_key = ops.array(x.kept_key).far(slot * form.key_heads + self.key_head, CHUNK * form.size)
        self.known = (edge > 0) & (self.count > 0) if form.in_slots else always
        # What does not need the number of tokens is asked for before that is known.
        tokens = self.read()
        self.ask()
        self.write_edge(edge)
        self.write_nothing()
        crosses = (self.count > 0) & (self.here + self.count > CHUNK)
        first = ops.equal(self.part, 0)
        last = first & ops.equal(self.head % form.group, form.group - 1)
        ops.when((self.count > 0) & ~crosses, lambda: self.compute(tokens, (first, last), first=True))
        ops.when(crosses, self.over_edge)

    def ask(self) -> None:
        """Asks for more that does not need the number of tokens: nothing here."""

    def write_edge(self, edge: Any) -> None:
        """Writes the edge of the sequence after its tokens."""
        ops = self.ops
        first = ops.equal(ops.lane, 0) & ops.equal(ops.warp, 0) & ops.equal(self.part, 0) & ops.equal(self.head, 0)
        passed = ops.select(self.count > 0, (self.here + self.count - 1) & -CHUNK, ops.number(0))
        ops.store(ops.array(self.x.new_edge).at(self.batch), [edge + passed], first)

    def over_edge(self) -> None:
        """Computes tokens of which at least one is in the next chunk, whose rows are written over those of this one.

        Keys are read by all blocks of a group of heads, T and G by all blocks of a head. A block says when it has read
        them, in the last row of its residuals, which it has read too, and the last block writes; two that come at the
        same time may both write the same. That row is written again before the next edge.
        """
        ops, form, count = self.ops, self.form, self.count
        near = CHUNK - self.here
        self.count = near
        self.copy_state()
        if form.tokens > 1:
            # Every block writes what it reads.
            r = self.compute(self.read(), (ops.true(), ops.true()), first=False)
            ops.barrier()
        else:
            r = self.operands(self.read_residuals())
            ops.await_copies()
        self.cross(r)
        ops.barrier()
        writes = self.turn()
        self.done, self.count, self.here = near, count - near, ops.number(0)
        self.compute(self.read(), writes, first=False)

    def turn(self) -> tuple[Any, Any]:
        """Says that the block has read the rows of a chunk.

        Returns:
            Whether all blocks of the head have, and all blocks of the group of heads.
        """
        ops, form = self.ops, self.form
        base = self.first_residual.far(self.head // form.group * form.group, CHUNK * form.size).at(
            (CHUNK - 1) * form.size
        )
        size = CHUNK * form.size
        ops.raise_flag(base.far(self.head % form.group, size).at(self.column_of_part), _READ)
        of_head, of_group = ops.true(), ops.true()
        for head in range(form.group):
            for part in range(form.parts):
                flag = ops.is_raised(base.at(head * size + part * form.columns), _READ)
                of_group = of_group & flag
                of_head = of_head & (flag | ~ops.equal(self.head % form.group, head))
        return of_head, of_group

    def cross(self, r: list[list[list[Any]]]) -> None:
        """Replaces the state by that after a whole chunk, of which all rows are kept."""
        ops, form = self.ops, self.form
        (newest,) = ops.load(self.decay.at(CHUNK - 1), 1, ops.true(), floats=True)
        broken, left = self.turned(r)
        u = self.added(left, newest)
        grown = ops.power_of_two(newest)
        place = (self.quad * 2) * form.pitch + ops.warp * (8 * form.tiles) + ops.lane // 4 * form.tiles
        target = self.state.at(self.quad * 2 * form.size + self.column + ops.lane // 4 * form.tiles)
        keys = self.kept_key.at(self.quad * 2 * form.size + ops.lane // 4)

        def rows(i: Any, _: list[Any]) -> list[Any]:
            own = [place + i * (8 * form.pitch) + e * form.pitch for e in range(2)]
            old = [ops.load_shared(at, form.tiles, floats=True) for at in own]
            new: list[list[Any]] = [[None] * form.tiles for _ in range(2)]
            halves = [
                [ops.load_half(keys.at(i * 8).at((16 * step + n) * form.size), ops.true()) for n in (0, 1, 8, 9)]
                for step in range(STEPS)
            ]
            right = [[ops.lows(a, b), ops.lows(c, d)] for a, b, c, d in halves]
            for p in range(len(u)):
                tiles = [j for j in (2 * p, 2 * p + 1) if j < form.tiles]
                sums = [ops.product(old[e][j], grown) for j in tiles for e in range(2)]
                found = self.chain([*sums, *[0.0] * (4 - len(sums))], u[p], right)
                for at, j in enumerate(tiles):
                    for e in range(2):
                        new[e][j] = ops.select(broken[j], float("nan"), found[2 * at + e])
            for e in range(2):
                ops.store_shared(own[e], new[e], ops.true())
                ops.store(target.at(i * (8 * form.size)).at(e * form.size), new[e], ops.true())
            return []

        ops.repeat(form.size // 8, [], rows)

    def turned(self, r: list[list[list[Any]]]) -> tuple[list[Any], list[list[list[Any]]]]:
        """Returns which columns of the lane have nan, and residuals without nan as left operands of two tiles each.

        Right operands of other products are left ones here, with rows for columns.
        """
        ops, tiles = self.ops, self.form.tiles
        broken, clean = [], []
        for operand in r:
            one, nans = self.without_nan(operand)
            any_nan = ops.number(0)
            for words in nans:
                any_nan = any_nan | words[0] | words[1]
            broken.append(~ops.equal(self.of_quad(any_nan), 0))
            clean.append(one)
        if tiles == 1:
            clean.append([[ops.number(0)] * 2 for _ in range(STEPS)])
        left = [
            [[a[0], b[0], a[1], b[1]] for a, b in zip(first, second, strict=True)]
            for first, second in zip(clean[::2], clean[1::2], strict=True)
        ]
        return broken, left

    def added(self, left: list[list[list[Any]]], newest: Any) -> list[list[list[Any]]]:
        """Returns u of the contract as left operands, with the columns of two tiles as rows.

        Args:
            left: The residuals as left operands.
            newest: G of the chunk's last row.
        """
        ops = self.ops
        u: list[list[list[Any]]] = [[[] for _ in range(STEPS)] for _ in left]
        for tile in range(CHUNK // 8):
            ops.part()
            right = self.rows_of_inverse(tile)
            column = self.quad * 2 + 8 * tile
            logs = ops.load(self.decay.at(column), 2, ops.true(), floats=True)
            ages = [ops.power_of_two(ops.difference(newest, x)) for x in logs]
            for p, residuals in enumerate(left):
                found = self.chain([0.0] * 4, residuals, right)
                for half in (found[:2], found[2:]):
                    u[p][tile // 2].append(ops.pack(*(ops.product(x, a) for x, a in zip(half, ages, strict=True))))
        return u

    def rows_of_inverse(self, tile: int) -> list[list[Any]]:
        """Returns 8 rows of T as right operands, with the rows as columns."""
        ops, found = self.ops, []
        row, column = ops.lane // 4 + 8 * tile, self.quad * 2
        upper = tile < CHUNK // 16
        base = self.inverse.at(self.inverse_place(row, column, upper=upper))
        sign = -1 if self.form.in_slots and upper else 1
        for step in range(STEPS):
            numbers = []
            for i in (0, 1, 8, 9):
                at = 16 * step + i
                numbers += ops.load(base.at(sign * at), 1, column + at <= row, floats=True)
            found.append([ops.pack(*numbers[:2]), ops.pack(*numbers[2:])])
        return found

    def write_nothing(self) -> None:
        """Writes zeros for the tokens from the end of the sequence on."""
        ops, form = self.ops, self.form
        row = self.of_token(self.x.out, form.value_heads, self.head, form.size, self.token)
        missing = (self.token >= self.count) & (self.token < form.tokens)
        ops.store(self.own_columns(row), [ops.number(0)] * form.tiles, missing)
