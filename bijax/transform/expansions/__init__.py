"""Operations of JAX written out as others of JAX, which are made invariant in their turn: a plug-in of the transform.

An expansion takes the operands and parameters of its primitive and is traced under the request of the equation that it
stands for, so all it holds is lowered as if the user's program had said it: it needs neither kernels nor a contract of
its own, on any platform, and nothing in it sees more than its own matrix, row or number. Small matrices on a CPU are
left to LAPACK, one at a time (`_lapack`).

Importing this package registers the rules for these operations (`_rules`); nothing else knows of them.
"""

from bijax.transform.expansions import _rules as _rules
