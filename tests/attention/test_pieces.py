"""Tiles of one block of keys are compared by their pieces, and have the reference's bits as a whole if these have."""

from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.attention.blockwise.tiling import ProgramShape
from pallas_kernels.attention.cpu import launch, pieces
from pallas_kernels.attention.schedule.cpu import Tile, attention_tiles

SHAPE = ProgramShape(2, 2, 8, 8)
SHAPES = {
    "narrow": (SHAPE, (3, 5, 40)),
    "model": (ProgramShape(3, 3, 64, 64), (8, 64, 64)),
    "decoding": (ProgramShape(3, 3, 64, 64), (8, 1, 128)),
    "one head": (ProgramShape(1, 1, 80, 48), (2, 17, 100)),
    "one group": (ProgramShape(1, 4, 24, 16), (1, 64, 64)),
    "tiny": (ProgramShape(1, 1, 2, 2), (1, 1, 9)),
}


def whole_tile_agrees(tile: Tile, shape: ProgramShape) -> bool:
    sequences, queries = np.arange(tile.sequences) % launch._SEQUENCES, np.arange(tile.queries) % launch._QUERIES
    at = np.ix_(sequences, queries)
    query, key, value, first, last = launch._probe(shape, tile.keys)
    given = query[at], key[sequences], value[sequences], first[at], last[at]
    actual = launch._compile_and_run(launch._probe_program(tile, shape.capped), *given)
    return launch._same_bits(actual, [e[at] for e in launch._reference_of_probe(shape, tile.keys)])


@pytest.mark.tier("full")
@pytest.mark.parametrize("name", SHAPES)
def test_tiles_agree_if_their_pieces_do(name: str) -> None:
    shape, call = SHAPES[name]
    tiles = [t for t in attention_tiles(*call, heads=shape.heads, size=shape.size) if t.one_block]
    assert tiles
    for tile in tiles:
        if pieces.pieces_agree(tile, shape):
            assert whole_tile_agrees(tile, shape), tile


@pytest.mark.tier("full", fast=("dot",))
@pytest.mark.parametrize("piece", ["dot", "softmax_weights"])
def test_a_piece_with_other_bits_is_found_out(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One element of one row, in its last bit, is enough."""
    right, tile = getattr(pieces, piece), Tile(2, 3, one_block=True)

    def wrong(*args: Any, **options: Any) -> jax.Array:
        found = right(*args, **options)
        if found.shape[2] <= SHAPE.group:  # the reference has one query
            return found
        return found.at[1, 0, 1, 5].multiply(np.float32(1 + 2**-23))

    assert pieces.pieces_agree(tile, SHAPE)
    monkeypatch.setattr(pieces, piece, wrong)
    pieces._compile.cache_clear()
    jax.clear_caches()  # of what was traced with the right one
    assert not pieces.pieces_agree(tile, SHAPE)
    pieces._compile.cache_clear()
    jax.clear_caches()


def test_a_tile_of_one_block_is_compared_by_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    requested = []
    monkeypatch.setattr(launch, "pieces_agree", lambda tile, shape: requested.append(tile))
    for tile in (Tile(5, 7, one_block=True), Tile(5, 7)):
        monkeypatch.setattr(launch, "_compile_and_run", lambda program, *arrays: requested.append(program) or ())
        monkeypatch.setattr(launch, "_reference_of_probe", lambda shape, keys: ())
        launch.honours_contract.__wrapped__.__wrapped__(tile, SHAPE)
    first, second = requested
    assert first == Tile(5, 7, one_block=True)
    assert callable(second)
