"""The kernels of rows and of sums over rows, each with its portable form, on the same arguments."""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bijax.testing import hostile_rows
from pallas_kernels.contract import chunk_contract, row_contract
from pallas_kernels.norm import hopper as norm_hopper
from pallas_kernels.norm import portable as norm
from pallas_kernels.rows import hopper as rows_hopper
from pallas_kernels.rows import portable as rows
from pallas_kernels.target import Target


@dataclass(frozen=True)
class Case:
    """One operation: what it is called with, and its two forms."""

    name: str
    portable: Callable[..., Any]
    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    parameters: dict[str, Any]

    def expected(self) -> list[np.ndarray]:
        """Returns what the portable form gives on the CPU."""
        return next(self.all_expected([self]))

    def all_expected(self, cases: "Iterable[Case]") -> Iterator[list[np.ndarray]]:
        """Yields what this case's portable form, compiled once, gives on the CPU for each case's arguments."""
        program = jax.jit(lambda *a: self.portable(*a, **self.parameters))
        for case in cases:
            with jax.default_device(jax.devices("cpu")[0]):
                results = program(*(None if a is None else jnp.asarray(a) for a in case.arguments))
            yield [np.asarray(r) for r in jax.tree.leaves(results)]

    def all_found(self, cases: "Iterable[Case]") -> Iterator[list[np.ndarray]]:
        """Yields what this case's kernel, compiled once, gives on the default device for each case's arguments."""
        program = jax.jit(lambda *a: self.kernel(*a, **self.parameters))
        for case in cases:
            yield [np.asarray(r) for r in jax.tree.leaves(program(*case.arguments))]

    def found(self, **parameters: Any) -> list[np.ndarray]:
        """Returns what the kernel gives on the default device."""
        results = self.kernel(*self.arguments, **self.parameters, **parameters)
        return [np.asarray(r) for r in jax.tree.leaves(results)]


def triton_kernel(name: str, target: str = "sm_90") -> Callable[..., Any]:
    """Returns a kernel of rows through jax-triton for a target."""
    from pallas_kernels.norm.jax_triton import launch as norm_triton  # needs Triton
    from pallas_kernels.rows.jax_triton import launch as rows_triton

    module = norm_triton if hasattr(norm, name) else rows_triton
    return functools.partial(getattr(module, name), target=Target.parse(target))


def hopper_kernel(name: str) -> Callable[..., Any]:
    kernel: Callable[..., Any] = getattr(norm_hopper if hasattr(norm, name) else rows_hopper, name)
    return kernel


def cases(
    m: int,
    columns: int,
    dtype: str,
    weights: str | None = None,
    kind: str = "normal",
    kernel: Callable[[str], Callable[..., Any]] = hopper_kernel,
) -> Iterator[Case]:
    """Yields every operation on (m, columns) arrays, with vectors of the dtype `weights`, and `kernel(name)`."""
    data = [hostile_rows(seed, (m, columns), dtype) for seed in range(3)]
    x, g, residual = data[0][kind], data[1]["normal"], data[2]["normal"]
    w, b = (hostile_rows(seed, (columns,), weights or dtype)["normal"] for seed in (3, 4))
    factor, mean = (hostile_rows(seed, (m, 1), "float32")["normal"] for seed in (5, 6))
    along, over, eps = {"contract": row_contract()}, {"contract": chunk_contract()}, {"eps": 1e-6}

    def case(name: str, arguments: tuple[Any, ...], parameters: dict[str, Any], label: str = "") -> Case:
        theirs = getattr(norm if hasattr(norm, name) else rows, name)
        return Case(f"{name}{label}", theirs, kernel(name), arguments, parameters)

    yield case("rms_norm", (x, w), along | eps)
    yield case("rms_norm", (x, None, residual), along | eps, " of a sum")
    yield case("rms_norm", (x, w, residual), along | eps | {"offset": 1.0}, " with an offset")
    yield case("rms_norm", (x,), along | eps | {"offset": 0.3}, " times a number")
    yield case("rms_norm", (x, w, residual), along | eps | {"dtype": "float32"}, " in float32")
    wide = hostile_rows(7, (m, columns), "float32")["normal"]
    yield case("rms_norm", (x, w, wide), along | eps, " of a sum that is rounded first")
    yield case("rms_norm_gradient", (x, factor, g, w), along)
    yield case("rms_norm_gradient", (x, factor, g, None, residual), along, " of a sum")
    yield case("rms_norm_gradient", (x, factor, g, w, residual), along | {"offset": 1.0}, " with an offset")
    yield case("rms_norm_gradient", (x, factor, g), along | {"offset": 0.3}, " times a number")
    yield case("rms_norm_gradient", (x, factor, g.astype(np.float32), w), along, " from float32")
    yield case("layer_norm", (x, w, b), along | eps)
    yield case("layer_norm", (x, None, b), along | eps, " without weight")
    yield case("layer_norm_gradient", (x, mean, factor, g, w), along)
    yield case("weight_gradient", (x, factor, g), over)
    yield case("weight_gradient", (x, factor, g, mean), over, " of layer_norm")
    yield case("sum_axis", (x[:, :, None],), along)
    yield case("sum_axis", (x[:, :, None],), along | {"mean": True}, " as a mean")
    yield case("variance", (x[:, :, None],), along | {"ddof": 1})
    yield case("sum_rows", (x,), over | {"accumulate": b.astype(np.float32)})
