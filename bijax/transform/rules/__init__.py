"""The rules for JAX primitives in a program that is made invariant.

A rule defines for one primitive, on one platform or on all, its treatment (`Kind`), why that is right, and how it is
lowered. The rules are data: lowering, `bijax.audit`, `bijax.contracts` and the documentation read one registry. The
modules `_kept`, `_elementwise`, `_ordered`, `_programs` and `_refused` register the rules for JAX's primitives, and
`bijax.transform.expansions` its own.
"""
