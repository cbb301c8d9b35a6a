"""Row programs: operations on rows that one kernel computes on a Hopper GPU, with the bits of the separate operations.

A softmax or its gradient written as separate operations costs a pass over the rows per reduction and one after it.
Here the equations of a program are searched for such regions (`_regions`), which become one equation (`_programs`), a
kernel call (`_layout`, `pallas_kernels.row_program`). It is a schedule: no bit depends on it, so contracts and
fingerprints do not distinguish programs with it from programs without. `fuse_rows=False` of `bijax.invariant` and of
the mode disables it.

The kernel copies the instructions that XLA:GPU emits for `exp`, `/` and `rsqrt`. `_probe` compares the two once in a
process that has the GPU, before the first such kernel is used.
"""

from bijax.transform.fusion._layout import run_row_program as run_row_program
from bijax.transform.fusion._products import PRODUCT as PRODUCT
from bijax.transform.fusion._programs import ROW_PROGRAM as ROW_PROGRAM
from bijax.transform.fusion._programs import has_row_programs as has_row_programs
from bijax.transform.fusion._programs import with_row_programs as with_row_programs
