"""Caches for equal kernels: their lowered modules, and threads that compile them ahead of time.

- `lowered_forms`: the MLIR of a kernel, lowered once for equal calls in a process, and shared with other processes.
- `kernels_ahead`: compiles Mosaic kernels in threads while the program around them is still being lowered.
- `pallas_kernels.runtime.disk_cache`: the folder on disk, and the verified candidate programs of this CPU.

See docs/guide/lowering-cache.md. The environment variable `BIJAX_LOWERING_CACHE=off` disables all of it.
"""
