"""The library adds to the keys of JAX's caches once, so what was compiled before is compiled again once."""

import subprocess
import sys

PROGRAM = """
import jax
import jax.numpy as jnp

traces = []

@jax.jit
def program(x):
    traces.append(x)
    return jnp.sin(x)

program(1.0)
import bijax
program(1.0)
assert len(traces) == 1
invariant = jax.jit(bijax.invariant(jnp.tanh))
for _ in range(2):
    program(1.0)
assert len(traces) == 2
invariant(1.0)
import bijax.parallel, bijax.serving, flax_layers
with bijax.lowering_for("sm_90"):
    pass
with bijax.set_batch_invariant_mode():
    pass
program(1.0)
assert len(traces) == 2, len(traces)
"""


def test_programs_of_the_caller_are_compiled_again_once() -> None:
    found = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
