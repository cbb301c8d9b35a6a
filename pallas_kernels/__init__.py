"""Batch-invariant kernels on arrays, with a folder for each operation and a file or folder for each backend.

A `contract` determines the bits of an operation, a `schedule` its speed; `parts` contains the building blocks of
kernels. The kernels are independent of automatic differentiation and policy, and can be used without bijax.
"""
