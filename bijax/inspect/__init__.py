"""What a program is made of, before it runs: `bijax.audit`, `bijax.contracts`, and the table of kernels.

- `audit`, `audit_report`, `audit_flops`, `audit_command`: every operation with its verdict, and the command.
- `contracts`: under which contracts a program is computed, and their fingerprint.
- `kernel_table`: which kernel serves which operation on which target (`bijax kernels`).
"""
