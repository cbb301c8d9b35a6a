"""The kernels of each backend, as data: a module for each, with `KERNELS`; see `pallas_kernels.registry`.

These modules are imported whatever the target is, so they import contracts and schedules alone, and name the kernels.
"""
