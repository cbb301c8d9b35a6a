"""How many pages the cache gets."""

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import jax
from jax.sharding import Mesh

from bijax.serving.model import Model, state_interval
from bijax.serving.options import EngineOptions

GPU_FRACTION: Final = 0.85
"""The rest is for the arrays inside programs."""

CPU_BYTES: Final = 2**30
"""On a CPU, whose memory other programs use too."""

_INDEX: Final = 2**31
"""Programs count the elements of an array in 32 bits."""


def choose_num_pages(model: Model, options: EngineOptions, *, max_length: int) -> int:
    """Returns the number of pages for which there is memory, at most as many as all running sequences can use.

    With the option `num_pages` it is that one. Otherwise, of the memory that JAX has on the GPU, `mem_fraction_static`
    is for weights and cache; of several GPUs of this process the one with the least room decides. On other devices that
    fraction of the memory which is available is for the cache; without the option it is 1 GiB, or a quarter of the
    available memory if that is less. No bit depends on the number.

    Args:
        model: The model, whose weights are in memory.
        options: The options of the engine.
        max_length: Longest sequence, in tokens.

    Raises:
        ValueError: If there is no memory for a single page.
    """
    if options.num_pages is not None:
        return options.num_pages
    page_size = options.page_size
    mesh: Mesh | None = getattr(model, "mesh", None)
    arrays = _arrays(model, lambda: model.init_pages(1, page_size))
    page_bytes = sum(a.size * a.dtype.itemsize for a in arrays)
    devices = (
        [_device(model)] if mesh is None else [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    )
    room = min(cache_bytes(device, options.mem_fraction_static) for device in devices)
    if mesh is not None and devices[0].platform == "cpu":
        room //= len(devices)  # they share the memory of the host
    room -= sum(StateBytes.of(model).total(options))
    useful = options.max_running * -(-max_length // page_size)
    addressed = min((_INDEX - 1) // a.size for a in arrays)
    pages = min(room // page_bytes, useful, addressed)
    if pages < 1:
        raise ValueError(
            f"Engine: a page of the cache takes {page_bytes} bytes, and there is room for {max(0, room)}; free memory,"
            " raise mem_fraction_static, or set num_pages."
        )
    return pages


class StateBytes(NamedTuple):
    """Memory of a model's states on a device, in bytes.

    Attributes:
        running: Of a running sequence.
        snapshot: Of a snapshot.
    """

    running: int = 0
    snapshot: int = 0

    @classmethod
    def of(cls, model: Any) -> "StateBytes":
        """Returns the bytes for a model; 0 for a model that keeps only pages."""
        if state_interval(model) is None:
            return cls()
        made = [_arrays(model, functools.partial(make, 1)) for make in (model.init_states, model.init_snapshots)]
        return cls(*(sum(a.size * a.dtype.itemsize for a in arrays) for arrays in made))

    def total(self, options: EngineOptions) -> tuple[int, int]:
        """Returns the bytes of all running sequences, and of all snapshots."""
        return self.running * options.max_running, self.snapshot * num_snapshots(options)


def num_snapshots(options: EngineOptions) -> int:
    """Returns the number of snapshots: two for each running sequence, unless the options state it."""
    return 2 * options.max_running if options.state_snapshots is None else options.state_snapshots


def cache_bytes(device: jax.Device, fraction: float | None) -> int:
    """Returns the bytes of memory that the cache may take.

    Args:
        device: Where the model is.
        fraction: See `EngineOptions.mem_fraction_static`.
    """
    stats: Mapping[str, int] | None = device.memory_stats()
    if stats and "bytes_limit" in stats:
        share = GPU_FRACTION if fraction is None else fraction
        return int(stats["bytes_limit"] * share) - stats["bytes_in_use"]
    available = available_bytes()
    return min(CPU_BYTES, available // 4) if fraction is None else int(available * fraction)


def available_bytes() -> int:
    """Returns the bytes of the host's memory that programs can still take."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _arrays(model: Model, make: Callable[[], Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns what a device has of arrays that a model makes."""
    mesh: Mesh | None = getattr(model, "mesh", None)
    if mesh is None or mesh.size == 1:
        return jax.tree.leaves(jax.eval_shape(make))
    whole: list[jax.Array] = jax.tree.leaves(make())
    return [jax.ShapeDtypeStruct(a.sharding.shard_shape(a.shape), a.dtype) for a in whole]


def _device(model: Model) -> jax.Device:
    # A model that is no pytree is a leaf of its own.
    arrays = [leaf for leaf in jax.tree.leaves(model) if isinstance(leaf, jax.Array)]
    return next(iter(arrays[0].devices())) if arrays else jax.local_devices()[0]
