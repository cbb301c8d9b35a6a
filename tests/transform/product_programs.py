"""Random programs of products: axes of length one, batch dimensions and transposes anywhere, on any platform."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

LENGTHS = ((1, 1, 3, 3, 4, 8), (1, 1, 1, 2, 3, 4, 5, 8, 17))
LARGEST = (256, 2048)
DTYPES = (jnp.float32, jnp.float32, jnp.bfloat16, jnp.float16)
BATCH = 17
BATCHES = (1, 2, 3, 5, 8)

Transform = Callable[[Callable[..., Any]], Callable[..., Any]]


class _Maker:
    """Makes random choices, the same for one seed whenever a program is traced."""

    def __init__(self, seed: int):
        self.rng = np.random.default_rng(seed)
        self.lengths = LENGTHS[seed % 4 // 2]
        self.largest = LARGEST[seed % 4 // 2]

    def shape(self, axes: int) -> list[int]:
        return self.rng.choice(self.lengths, axes).tolist()

    def below(self, n: int) -> int:
        return int(self.rng.integers(n))

    def normal(self, shape: Sequence[int], dtype: Any) -> jax.Array:
        return jnp.asarray(self.rng.standard_normal(shape), dtype)

    def product(self, a: jax.Array, b: jax.Array) -> jax.Array:
        """A product with pairs of axes of one length contracted, or kept as batch dimensions, in any order."""
        free = list(range(b.ndim))
        contracting: list[tuple[int, int]] = []
        batch: list[tuple[int, int]] = []
        for i in self.rng.permutation(a.ndim).tolist():
            fits = [j for j in free if b.shape[j] == a.shape[i]]
            if fits and (role := self.below(4)):
                free.remove(j := fits[self.below(len(fits))])
                (batch if role == 1 else contracting).append((i, j))
        size = a.size * b.size // math.prod(a.shape[i] ** 2 for i, _ in contracting)
        while batch and size // math.prod(a.shape[i] for i, _ in batch) > self.largest:
            contracting.append(batch.pop())
            size //= a.shape[contracting[-1][0]] ** 2
        if size > self.largest:  # what would become too large is cut
            kept = [i for i, _ in (*contracting, *batch)]
            a = a[tuple(slice(None) if i in kept else slice(0, 1) for i in range(a.ndim))]
        dims = tuple(tuple(zip(*pairs, strict=True)) or ((), ()) for pairs in (contracting, batch))
        terms = math.prod(a.shape[i] for i, _ in contracting)
        return lax.dot_general(a, b, dims) * np.asarray(1 / math.sqrt(terms), a.dtype)

    def weights(self, a: jax.Array) -> jax.Array:
        """Weights that have some of the lengths of an array."""
        kept = [n for n in a.shape if self.below(3)][:3]
        shape = self.rng.permutation([*kept, *self.shape(self.below(3))]).astype(int).tolist()
        return self.normal(shape, a.dtype)

    def moved(self, a: jax.Array) -> jax.Array:
        """The array with its axes permuted, merged, added, repeated, turned around or cut."""
        for _ in range(self.below(3)):
            match self.below(6):
                case 0 if a.ndim > 1:
                    a = a.transpose(self.rng.permutation(a.ndim).tolist())
                case 1 if a.ndim > 1:
                    at = self.below(a.ndim - 1)
                    a = a.reshape(*a.shape[:at], a.shape[at] * a.shape[at + 1], *a.shape[at + 2 :])
                case 2:
                    a = jnp.expand_dims(a, self.below(a.ndim + 1))
                case 3 if a.size < self.largest // 4:
                    at = self.below(a.ndim + 1)
                    a = jnp.repeat(jnp.expand_dims(a, at), 3, at)
                case 4 if a.ndim:
                    a = jnp.flip(a, self.below(a.ndim))
                case 5 if a.ndim:
                    a = lax.slice_in_dim(a, 0, 1, axis=self.below(a.ndim))
        return a if a.ndim <= 5 else a.reshape(*a.shape[:3], -1)

    def looped(self, a: jax.Array) -> jax.Array:
        """Products in a loop."""
        columns = a.shape[-1] if a.ndim else 1
        w = self.normal((columns, columns), a.dtype) * np.asarray(1 / math.sqrt(columns), a.dtype)
        rows = a.reshape(-1, columns)
        return lax.scan(lambda h, _: (h @ w, h[0]), rows, length=1 + self.below(3))[0].reshape(a.shape)


def random_program(seed: int) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """Returns a program of two to four products and perhaps loops, of two arrays of an example and of weights."""

    def run(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        make = _Maker(seed)
        values = [x, y, w]
        for _ in range(2 + make.below(3)):
            a = make.moved(values[-1] if len(values) > 4 else values[make.below(len(values))])
            b = make.moved(values[make.below(len(values))]) if make.below(2) else make.weights(a)
            values.append(make.product(a, b))
            if not make.below(6):
                values.append(make.looped(values[-1]))
        return values[-1]

    return run


@dataclasses.dataclass(frozen=True)
class Case:
    """A program over a batch, and its arguments.

    Attributes:
        run: Maps a batch of examples and weights to arrays with the batch in front.
        take: Maps the first and the number of examples to arguments.
    """

    run: Callable[..., tuple[jax.Array, ...]]
    take: Callable[[int, int], tuple[jax.Array, ...]]


def random_case(seed: int) -> Case:
    """Returns a random program under `vmap` over random axes; for odd seeds its gradients for each example too."""
    make = _Maker(seed)
    program = random_program(seed)
    dtype = DTYPES[make.below(len(DTYPES))]
    shapes = [make.shape(1 + make.below(3)) for _ in range(3)]
    arrays = [make.normal((BATCH, *shape), dtype) for shape in shapes[:2]]
    w = make.normal(shapes[2], dtype)
    axes = [make.below(len(shape) + 1) for shape in shapes[:2]]
    out = make.below(jax.eval_shape(program, *(a[0] for a in arrays), w).ndim + 1)

    def loss(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        z = program(x, y, w)
        return (z * jnp.linspace(-1, 1, z.size, dtype=z.dtype).reshape(z.shape)).sum()

    def run(x: jax.Array, y: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        results = (jnp.moveaxis(jax.vmap(program, (*axes, None), out)(x, y, w), out, 0),)
        return results + jax.vmap(jax.grad(loss, (0, 1, 2)), (*axes, None))(x, y, w) if seed % 2 else results

    def take(start: int, examples: int) -> tuple[jax.Array, ...]:
        some = (jnp.moveaxis(a[start : start + examples], 0, axis) for a, axis in zip(arrays, axes, strict=True))
        return (*some, w)

    return Case(run, take)


def differences(
    case: Case, transform: Transform = lambda run: run, batches: Sequence[int] = BATCHES
) -> list[tuple[int, int]]:
    """Returns the batch sizes at which bits are others than in the whole batch, and how many elements differ.

    Args:
        case: The program.
        transform: Applied to it before it is compiled, such as `bijax.invariant`.
        batches: Batch sizes.
    """
    run = jax.jit(transform(case.run))

    def bits(start: int, examples: int) -> list[np.ndarray]:
        results = [np.asarray(r) for r in run(*case.take(start, examples))]
        return [r.view(f"u{r.itemsize}") for r in results]

    whole = bits(0, BATCH)
    found = []
    for n in batches:
        start = 7 * n % (BATCH - n + 1)
        pairs = zip(bits(start, n), whole, strict=True)
        if different := sum(int((a != b[start : start + n]).sum()) for a, b in pairs):
            found.append((n, different))
    return found
