"""Makes whole programs batch-invariant.

- `invariant`, `mode`, `accumulate`, `errors`: the public functions.
- `hook`: connects requests to JAX's lowering.
- `rules`: the rule for each primitive; the registry used by lowering, audit and the documentation.
- `cpu`, `gpu`: prevent the rewrites of XLA's compilers.
- `expansions`: linear algebra, FFT and complex numbers; a plug-in that registers rules.
- `fusion`: row operations merged into one kernel.
"""

from bijax.transform.accumulate import accumulate_gradients as accumulate_gradients
from bijax.transform.errors import NotInvariantError as NotInvariantError
from bijax.transform.gradient_sum import GradientSum as GradientSum
from bijax.transform.invariant import invariant as invariant
from bijax.transform.mode import disable_batch_invariant_mode as disable_batch_invariant_mode
from bijax.transform.mode import enable_batch_invariant_mode as enable_batch_invariant_mode
from bijax.transform.mode import is_batch_invariant_mode_enabled as is_batch_invariant_mode_enabled
from bijax.transform.mode import set_batch_invariant_mode as set_batch_invariant_mode

# They register their rules, and nothing else imports them.
from bijax.transform import expansions as expansions  # isort: skip
from bijax.transform.rules import standard as standard  # isort: skip
