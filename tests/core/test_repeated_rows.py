"""Arrays of repeated rows: the same values written out or mapped, and the memory of one repetition."""

import gc
import os
from pathlib import Path

import jax
import numpy as np
import pytest

from pallas_kernels.runtime import repeated_rows
from pallas_kernels.runtime.ahead_of_time import ahead_of_time

_KINDS = 67


def _rows(k: int) -> np.ndarray:
    return np.arange(_KINDS * k, dtype=np.float32).reshape(_KINDS, k)


# The last place is cut in the middle of a page, at its start, and not at all; 3 columns are too few to fill pages.
@pytest.mark.parametrize(("k", "count"), [(64, 1 << 15), (576, 49152), (1024, 4 * _KINDS * 16), (3, 400_000), (8, 1)])
def test_rows_repeat(k: int, count: int) -> None:
    rows = _rows(k)
    found = repeated_rows.repeated_rows(rows, count)
    assert found.shape == (count, k)
    assert found.dtype == np.float32
    assert found.ctypes.data % 64 == 0
    np.testing.assert_array_equal(found.view(np.uint32), rows[np.arange(count) % _KINDS].view(np.uint32))


def _resident() -> int:
    """Returns the bytes of this process that belong to no file."""
    fields = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    return 1024 * (int(fields["RssAnon"].split()[0]) + int(fields["VmSwap"].split()[0]))


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is mapped on Linux")
def test_large_ones_take_little_memory_and_give_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, count = _rows(576), 1 << 15
    size = 4 * 576 * count
    files, mappings = len(os.listdir("/proc/self/fd")), _mappings()
    before = _resident()
    found = repeated_rows.repeated_rows(rows, count)
    assert float(found.sum(dtype=np.float64)) > 0
    assert _resident() - before < size / 8
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 0
    del found
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == files
    assert _mappings() <= mappings + 4

    # The control: written out, it takes its size.
    monkeypatch.delattr(os, "memfd_create")
    before = _resident()
    found = repeated_rows.repeated_rows(rows, count)
    assert _resident() - before > size / 2
    assert found.nbytes == size


def _mappings() -> int:
    return len(Path("/proc/self/maps").read_text(encoding="utf-8").splitlines())


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is mapped on Linux")
def test_written_out_where_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> int:
        raise OSError("not permitted")

    rows, count = _rows(64), 1 << 15
    for call in ("memfd_create", "pwrite"):
        with monkeypatch.context() as patched:
            patched.setattr(os, call, refused)
            found = repeated_rows.repeated_rows(rows, count)
        assert found.flags.writeable
        np.testing.assert_array_equal(found[-1], rows[(count - 1) % _KINDS])


def test_xla_reads_mapped_rows() -> None:
    rows, count = _rows(64), 1 << 15
    found = repeated_rows.repeated_rows(rows, count)
    total = ahead_of_time(lambda w: w.max(1), jax.ShapeDtypeStruct(found.shape, found.dtype))(found)
    np.testing.assert_array_equal(np.asarray(total), found.max(1))
