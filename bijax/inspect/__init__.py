"""Inspects a program before it runs: `bijax.audit`, `bijax.contracts`, and the table of kernels.

- `audit`, `audit_report`, `audit_flops`, `audit_command`: every operation with its verdict, and the command.
- `contracts`: the contracts of a program, and their fingerprint.
- `kernel_table`: the kernel that serves each operation on each target (`bijax kernels`).
"""
