"""Calls of the kernels that route tokens, rotate and draw, in Triton's interpreter, against the portable programs.

A program of its own, since Triton reads TRITON_INTERPRET when it is imported: `python -m
tests.jax_triton.interpreted_calls NAME`. It prints how many calls it compared, and the controls that differed.
"""

import sys
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from bijax.testing import assert_bits_equal
from pallas_kernels.contract import online_row_contract, row_contract
from pallas_kernels.delta_rule.jax_triton.invalid import nan_if_invalid
from pallas_kernels.expert_rows import portable as expert_rows
from pallas_kernels.expert_rows.jax_triton import launch as expert_rows_triton
from pallas_kernels.parts.no_row import UNREAD
from pallas_kernels.pick import portable as pick
from pallas_kernels.pick.jax_triton import launch as pick_triton
from pallas_kernels.rotary import portable as rotary
from pallas_kernels.rotary.jax_triton import launch as rotary_triton
from pallas_kernels.routing.jax_triton.launch import select_experts
from pallas_kernels.rows.jax_triton import launch as rows_triton
from pallas_kernels.sampling.jax_triton.launch import draw
from pallas_kernels.sampling.schedule.jax_triton import DrawTile
from pallas_kernels.softmax.jax_triton import launch as softmax_triton
from pallas_kernels.target import Target
from pallas_kernels.topk import portable as topk
from pallas_kernels.topk.jax_triton import launch as topk_triton
from tests.jax_triton.interpreted import interpret_launches
from tests.jax_triton.interpreter_instructions import interpret_instructions
from tests.moe.routing_cases import COUNTS, PLACES, SORTS, SUMS, numbers, rows_and_places, rows_to_add, scores
from tests.rotary.cases import case
from tests.rows.row_emulation import add_row, halve
from tests.sampling.draw_cases import COLUMNS, ROWS, given, wrong

TARGET: Final = Target.parse("sm_80")


def compare(found: Any, expected: Any) -> int:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert_bits_equal(a, b)
    return 1


def compare_largest() -> int:
    compared = 0
    for dtype in ("float32", "float16"):  # the interpreter widens subnormal bfloat16 numbers to other ones
        x = scores(4, 37, dtype)
        compared += compare(topk_triton.largest(x, number=9, target=TARGET), topk.largest(x, number=9))
    return compared


def compare_selected() -> int:
    """Compares with kernels of softmax, of the largest numbers and of sums, and in Hopper's order with numpy."""
    compared, orders_differ = 0, False
    for width, number in ((37, 9), (16, 10), (512, 10), (700, 1)):
        x = scores(4, width, "float32")
        both: dict[str, Any] = {"sums": row_contract(), "target": TARGET, "experts": width}
        found = select_experts(
            jnp.pad(x, ((0, 0), (0, 5)), constant_values=1e9), number=number, contract=row_contract(), **both
        )
        y = softmax_triton.softmax(x, contract=row_contract(), target=TARGET)
        places, chosen = topk_triton.largest(y, number=number, target=TARGET)
        total = rows_triton.sum_axis(chosen[:, :, None], contract=row_contract(), target=TARGET)
        compared += compare(found, (places, chosen, total))
        x = jnp.where(jnp.isfinite(x), x, -3.0)
        found = select_experts(x, number=number, contract=online_row_contract(width), **both)
        online = jnp.asarray(_online_softmax(np.asarray(x)))
        chosen = topk.largest(online, number=number)
        compared += compare(found, (*chosen, jnp.asarray(add_row(np.asarray(chosen[1])))))
        by_rows = select_experts(x, number=number, contract=row_contract(), **both)
        orders_differ |= bool((found[1] != by_rows[1]).any())
    return compared + orders_differ


def _online_softmax(x: np.ndarray) -> np.ndarray:
    """Returns softmax of rows of finite numbers in the order of `OnlineRowContract`, in one chunk."""
    blocks = np.full((len(x), -(-x.shape[1] // 128), 128), -np.inf, np.float32)
    blocks.reshape(len(x), -1)[:, : x.shape[1]] = x
    maxima = blocks.max(1)
    shift = np.where(np.isfinite(maxima), maxima, 0)
    powers = np.exp(blocks - shift[:, None])
    lanes = powers[:, 0]
    for i in range(1, blocks.shape[1]):
        lanes = lanes + powers[:, i]
    m = maxima.max(1, keepdims=True)
    return np.exp(x - m) * (np.float32(1) / halve(lanes * np.exp(maxima - m)))


def compare_experts() -> int:
    compared = 0
    for size, options in SORTS.values():
        experts = numbers(size, -2, options["end"] + 3)
        found = expert_rows_triton.sort_by_expert(experts, **options, target=TARGET)
        compared += compare(found, expert_rows.sort_by_expert(experts, **options))
    for dtype, columns, experts in (("bfloat16", 96, 7), ("float32", 2048, 40), ("int8", 64, 1)):
        x, _ = rows_and_places(dtype, columns)
        options, places = {"experts": experts, "topk": 30}, numbers(150, -2, experts + 3)
        found = expert_rows_triton.spread_to_experts(x, places, **options, target=TARGET)
        compared += compare(found, expert_rows.spread_to_experts(x, places, **options))
    for name, (count, rows) in COUNTS.items():
        counts = jnp.array(count, jnp.int32)
        found = expert_rows_triton.rows_by_count(counts, rows=rows, target=TARGET)
        compared += compare(found, expert_rows.rows_by_count(counts, rows=rows))
        assert bool(found[1]) == (name == "some")
    for sums in SUMS:
        arrays = rows_to_add(*sums)
        # In float32: the interpreter's conversion to 16 bits drops bits.
        found = expert_rows_triton.add_expert_rows(*arrays, dtype="float32", target=TARGET)
        compared += compare(found, expert_rows.add_expert_rows(*arrays, dtype="float32"))
    for name, (offset, places) in PLACES.items():
        offsets = jnp.array(offset, jnp.int32)
        row = expert_rows_triton.rows_of_tokens(offsets, places=places, target=TARGET)
        compared += compare(row, expert_rows.rows_of_tokens(offsets, places=places))
        assert int((row == -2).sum()) == {"some": 0, "twice": 1, "after the last": 6}[name]
    return compared


def compare_invalid() -> int:
    compared = 0
    for shape, dtype in (((3, 5, 2, 64), "float32"), ((2, 9000, 1, 4), "float16")):
        y = jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)
        for invalid in ([True, False, True], [False] * 3, [True] * 3):
            given = jnp.asarray(invalid[: shape[0]])
            (found,) = nan_if_invalid(y, given, target=TARGET)
            compared += compare(found, jnp.where(given[:, None, None, None], jnp.nan, y))
    return compared


def compare_picked() -> int:
    compared = 0
    for dtype, columns in (("bfloat16", 96), ("int8", 64), ("float32", 32), ("float16", 1024 * 11)):
        x, place = rows_and_places(dtype, columns)
        expected = pick.pick_rows(x, place)
        compared += compare(pick_triton.pick_rows(x, place, target=TARGET), expected)
        order = jnp.array([3, 1, 8, 0, 2, 7, 5, 4, 6], jnp.int32)[:, None]
        compared += compare(pick_triton.pick_rows(x, place, order, target=TARGET), expected)
        unread = pick_triton.pick_rows(x, place.at[4].set(UNREAD), target=TARGET)
        compared += compare(*(np.delete(np.asarray(rows), 4, axis=0) for rows in (unread, expected)))
    return compared


def compare_rotated() -> int:
    compared = 0
    for shape in ((5, 4, 2, 16), (4, 3, 1, 80), (1, 1, 1, 256)):
        for dtype in ("float32", "float16"):  # the interpreter truncates to bfloat16
            for to_rotate in (False, True):
                arrays = case(shape, dtype, to_rotate=to_rotate, exact=True)
                expected = rotary.rotate_and_store(*arrays)
                compared += compare(rotary_triton.rotate_and_store(*arrays, target=TARGET), expected)
    return compared


def compare_drawn() -> int:
    """Compares with float64, with other tokens as the control, and one cut of the rows with another."""
    arguments = given()
    tokens, otherwise_cut, *_ = (
        np.asarray(draw(*map(jnp.asarray, arguments), target=TARGET, tile=DrawTile(steps))) for steps in (4, 1)
    )
    assert wrong(tokens, arguments) == []
    assert (tokens == otherwise_cut).all()
    assert wrong((tokens + 1) % COLUMNS, arguments) == list(range(ROWS))
    logits = np.zeros((2, COLUMNS), np.float32)
    logits[:, 3], logits[1, 1200] = np.inf, np.nan
    words = np.zeros((2, 2), np.uint32)
    for temperature in (0, 1):  # a nan is found after a score that no other exceeds
        hot = np.full(2, temperature, np.float32)
        found = draw(*map(jnp.asarray, (logits, hot, words, words[:, 0])), target=TARGET, tile=DrawTile(4))
        assert found.tolist() == [3, -1]
    return 4


CALLS: Final = {
    "largest": compare_largest,
    "select": compare_selected,
    "experts": compare_experts,
    "invalid": compare_invalid,
    "pick": compare_picked,
    "rotate": compare_rotated,
    "draw": compare_drawn,
}

if __name__ == "__main__":
    interpret_launches()
    interpret_instructions()
    print(sum(CALLS[name]() for name in sys.argv[1:]))
