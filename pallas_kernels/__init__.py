"""Batch-invariant kernels: arrays in, arrays out, one folder per operation and one file per backend.

`contract` states what fixes the bits of an operation, `schedule` what fixes its speed. The kernels know neither
automatic differentiation nor policy and can be used on their own.
"""
