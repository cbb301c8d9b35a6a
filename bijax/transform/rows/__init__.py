"""Follows the batch axis through a program: which values hold rows, where rows meet, what depends on a row's position.

- `layout`: where the rows of an array lie, under reshapes, slices, concatenations.
- `value`: what is known of a value: its rows, and the places where rows met on the way to it.
- `flow`: runs over the equations of a program; `control` over loops and branches.
- `elementwise`, `moves`, `indexing`, `reductions`, `products`, `random`, `library`: the rules of primitives.
- `local`: operations on the rows of one device.

`bijax.inspect.rows_report` reports what became of rows; `bijax.transform.hook.cut_rows` leaves them on their devices.
"""
