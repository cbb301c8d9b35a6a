"""What lowering would do again for equal kernels, kept: lowered kernels, and threads that compile them ahead of time.

- `lowered_forms`: the MLIR of a kernel, made once for equal calls in a process, and for others on the machine.
- `kernels_ahead`: Mosaic kernels are compiled in threads while the program around them is still being lowered.
- `pallas_kernels.runtime.disk_cache`: the folder on disk, and which forms of a product keep a contract on this CPU.

docs/guide/lowering-cache.md describes them for users. The environment variable `BIJAX_LOWERING_CACHE=off` turns all of
it off.
"""
