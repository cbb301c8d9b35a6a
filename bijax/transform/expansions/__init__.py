"""Expands JAX operations into others, which are made invariant in turn: a plug-in of the transform.

An expansion takes the operands and parameters of its primitive and is traced under the request of the equation that it
replaces, so its operations are lowered as if the user had written them: it needs neither kernels nor its own contract
on any platform, and each result depends only on its own matrix, row or number. On a CPU, small matrices are left to
LAPACK, one at a time (`_lapack`), and Fourier transforms to XLA's library, eight at a time (`_fft_blocks`).

Importing this package registers the rules for these operations (`_rules`); nothing else refers to them.
"""

from bijax.transform.expansions import _rules as _rules
