"""Comparing arrays and pytrees bit for bit, and saying where they differ."""

import dataclasses
from typing import Any

import jax
import numpy as np

from bijax.testing._bits import NAN_DISTANCE, bits, is_float, to_numpy, ulp_distance, unequal_bits


@dataclasses.dataclass(frozen=True)
class ElementDifference:
    """One element that differs.

    Attributes:
        index: where it is in its array.
        actual: the value found.
        expected: the value it was compared with.
    """

    index: tuple[int, ...]
    actual: np.generic
    expected: np.generic

    @property
    def actual_bits(self) -> str:
        """The bit pattern found, in hexadecimal."""
        return _hex(self.actual)

    @property
    def expected_bits(self) -> str:
        """The bit pattern it was compared with, in hexadecimal."""
        return _hex(self.expected)

    @property
    def ulp_distance(self) -> int | None:
        """The ULP distance; None for integers and where a nan has no distance."""
        if not is_float(self.actual.dtype):
            return None
        distance = ulp_distance(np.asarray(self.actual), np.asarray(self.expected))[()]
        return None if distance == NAN_DISTANCE else int(distance)

    def describe_ulp(self) -> str:
        """Gives the ULP distance in words."""
        distance = self.ulp_distance
        if not is_float(self.actual.dtype):
            return f"none ({self.actual.dtype.name})"
        if distance is None:
            return "none (nan)"
        return "0 (only the sign of zero differs)" if distance == 0 else str(distance)


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
    """The differences between two arrays of one shape and dtype.

    Attributes:
        differing: number of elements that differ.
        first: the first of them, in row-major order.
        max_ulp_distance: the largest ULP distance among elements with one; None if none has.
        nan_mismatches: number of differing elements without a distance because of a nan.
    """

    differing: int
    first: ElementDifference
    max_ulp_distance: int | None
    nan_mismatches: int


def compare_bits(actual: np.ndarray, expected: np.ndarray, nan_bits: bool) -> ArrayDifference | None:
    """Compares two arrays of one shape and dtype; None means that every bit is the same.

    Args:
        actual: the array found.
        expected: the array to compare it with.
        nan_bits: whether two nans of other sign or payload differ.
    """
    unequal = unequal_bits(actual, expected, nan_bits)
    differing = int(np.count_nonzero(unequal))
    if not differing:
        return None
    index = tuple(int(i) for i in np.unravel_index(int(np.argmax(unequal)), unequal.shape))
    largest, nan_mismatches = None, 0
    if is_float(actual.dtype):
        distances = ulp_distance(actual[unequal], expected[unequal])
        comparable = distances[distances != NAN_DISTANCE]
        nan_mismatches = differing - comparable.size
        largest = int(comparable.max()) if comparable.size else None
    return ArrayDifference(differing, ElementDifference(index, actual[index], expected[index]), largest, nan_mismatches)


def too_large_for_rounding(actual: np.ndarray, expected: np.ndarray) -> bool:
    """Returns whether rows differ by more than half of the digits of their dtype, or in which elements are finite.

    Args:
        actual: rows found, (rows, ...).
        expected: the same rows, to compare with.
    """
    if not is_float(actual.dtype) or not actual.size:
        return False
    digits = float(np.sqrt(float(jax.numpy.finfo(actual.dtype).eps)))  # type: ignore[no-untyped-call]
    found, wanted = (x.astype(np.float64).reshape(len(x), -1) for x in (actual, expected))
    finite = np.isfinite(wanted)
    if (np.isfinite(found) != finite).any():
        return True
    largest = np.abs(np.where(finite, wanted, 0)).max(1, keepdims=True)
    with np.errstate(invalid="ignore"):  # infinities that are equal
        return bool((np.abs(found - wanted) > digits * largest)[finite].any())


def describe_largest(max_ulp_distance: int | None, nan_mismatches: int) -> str:
    """Gives the largest ULP distance in words, and the elements without one because of a nan."""
    text = "none" if max_ulp_distance is None else str(max_ulp_distance)
    return f"{text}; {nan_mismatches} elements differ by a nan" if nan_mismatches else text


def assert_bits_equal(actual: Any, expected: Any, *, err_msg: str = "", nan_bits: bool = False) -> None:
    """Asserts that two pytrees of arrays have the same structure, shapes, dtypes and bits.

    Unlike a comparison of values it tells +0 from -0, and takes a nan as equal to any nan in its place: which sign and
    payload a nan has follows the machine code, and no operation of bijax promises it.

    Args:
        actual: pytree of arrays; float16, bfloat16, float32, float64, bool or integers of 8 to 64 bits.
        expected: pytree to compare with.
        err_msg: prefix of a failure's message.
        nan_bits: whether the signs and payloads of nans are compared too.

    Raises:
        AssertionError: something differs. The message names the path of the first leaf that does, the number of
            differing elements, the first index, both values, both bit patterns, its ULP distance and the largest one.
        TypeError: a leaf has another dtype than those.

    Example:
        >>> import jax.numpy as jnp
        >>> assert_bits_equal({"y": jnp.arange(3.0)}, {"y": jnp.arange(3.0)})
        >>> assert_bits_equal({"y": jnp.array([1.0, 0.0])}, {"y": jnp.array([1.0, -0.0])})
        Traceback (most recent call last):
            ...
        AssertionError: bits differ at ['y']: 1 of 2 elements of float32(2,)
          first index (1,)
            actual   0.0 0x00000000
            expected -0.0 0x80000000
            ULP distance 0 (only the sign of zero differs)
          largest ULP distance 0
    """
    prefix = f"{err_msg}\n" if err_msg else ""
    actual_tree: Any = jax.tree.structure(actual)
    if actual_tree != jax.tree.structure(expected):
        raise AssertionError(prefix + _describe_structures(actual, expected))
    actual_leaves = jax.tree_util.tree_leaves_with_path(actual)
    expected_leaves = jax.tree.leaves(expected)
    for (path, actual_leaf), expected_leaf in zip(actual_leaves, expected_leaves, strict=True):
        where = jax.tree_util.keystr(path) or "the array"
        a, e = to_numpy(actual_leaf), to_numpy(expected_leaf)
        if (a.shape, a.dtype) != (e.shape, e.dtype):
            what = "shapes" if a.shape != e.shape else "dtypes"
            raise AssertionError(
                f"{prefix}{what} differ at {where}: actual {a.dtype.name}{a.shape}, expected {e.dtype.name}{e.shape}"
            )
        difference = compare_bits(a, e, nan_bits)
        if difference is not None:
            first = difference.first
            raise AssertionError(
                f"{prefix}bits differ at {where}: {difference.differing} of {a.size} elements of "
                f"{a.dtype.name}{a.shape}\n"
                f"  first index {first.index}\n"
                f"    actual   {first.actual!s} {first.actual_bits}\n"
                f"    expected {first.expected!s} {first.expected_bits}\n"
                f"    ULP distance {first.describe_ulp()}\n"
                f"  largest ULP distance {describe_largest(difference.max_ulp_distance, difference.nan_mismatches)}"
            )


def _describe_structures(actual: Any, expected: Any) -> str:
    actual_paths, expected_paths = _paths(actual), _paths(expected)
    structures = f"actual {jax.tree.structure(actual)}, expected {jax.tree.structure(expected)}"
    for paths, others, side in ((actual_paths, expected_paths, "actual"), (expected_paths, actual_paths, "expected")):
        alone = next((path for path in paths if path not in others), None)
        if alone is not None:
            return f"structures differ: only {side} has a leaf at {alone or 'the top'}: {structures}"
    return f"structures differ: {structures}"


def _paths(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _hex(value: np.generic) -> str:
    return f"0x{int(bits(np.asarray(value))[()]):0{2 * value.dtype.itemsize}x}"
