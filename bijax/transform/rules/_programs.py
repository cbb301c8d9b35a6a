"""Rules for primitives with programs, and those that lower a program into a region of one instruction."""

from typing import Final

from bijax.transform.rules.registry import Kind, Rule, register
from bijax.transform.rules.uses import fixed
from pallas_kernels.contract import XLA_FUNCTIONS

HOLDS: Final = "its programs are made invariant"

register(
    "call closed_call composite cond core_call custom_jvp_call custom_lin custom_linear_solve custom_vjp_call"
    " custom_vmap_call eval_jaxpr jit linear_call remat2 remat_opt run_state scan shard_map while xla_metadata_call",
    Rule(Kind.RECURSE, HOLDS),
)
# JAX's rules for these create a program when they are lowered.
register("random_gamma regularized_incomplete_beta", Rule(Kind.RECURSE, HOLDS, uses=fixed(XLA_FUNCTIONS)))
