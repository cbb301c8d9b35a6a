"""Batch-invariant kernels: arrays in, arrays out, a folder for each operation, a file or folder for each backend.

`contract` states what fixes the bits of an operation, `schedule` what fixes its speed; `parts` is what kernels are
built from, and `ops` holds them. The kernels know neither automatic differentiation nor policy and can be used on
their own.
"""
