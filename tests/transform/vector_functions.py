"""Functions that XLA:CPU computes by polynomials or iterations."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

FUNCTIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "acos": lambda x, y: lax.acos(jnp.tanh(x)),
    "acosh": lambda x, y: lax.acosh(jnp.abs(x) + 1),
    "asin": lambda x, y: lax.asin(jnp.clip(x / 8, -1, 1)),
    "asinh": lambda x, y: lax.asinh(x),
    "atan": lambda x, y: lax.atan(x),
    "atan2": lax.atan2,
    "atanh": lambda x, y: lax.atanh(jnp.clip(x / 8, -0.9, 0.9)),
    "bessel_i0e": lambda x, y: lax.bessel_i0e(x),
    "bessel_i1e": lambda x, y: lax.bessel_i1e(x),
    "cbrt": lambda x, y: lax.cbrt(x),
    "cos": lambda x, y: lax.cos(x),
    "cosh": lambda x, y: lax.cosh(x),
    "digamma": lambda x, y: lax.digamma(jnp.abs(x) + 1),
    "erf": lambda x, y: lax.erf(x),
    "erf_inv": lambda x, y: lax.erf_inv(jnp.clip(x / 8, -0.9, 0.9)),
    "erfc": lambda x, y: lax.erfc(x),
    "exp": lambda x, y: lax.exp(x),
    "exp2": lambda x, y: lax.exp2(x),
    "expm1": lambda x, y: lax.expm1(x),
    "igamma": lambda x, y: lax.igamma(jnp.abs(x) + 1, jnp.abs(y) + 1),
    "igamma_grad_a": lambda x, y: lax.igamma_grad_a(jnp.abs(x) + 1, jnp.abs(y) + 1),
    "igammac": lambda x, y: lax.igammac(jnp.abs(x) + 1, jnp.abs(y) + 1),
    "lgamma": lambda x, y: lax.lgamma(jnp.abs(x) + 1),
    "log": lambda x, y: lax.log(jnp.abs(x)),
    "log1p": lambda x, y: lax.log1p(jnp.abs(x)),
    "log2": lambda x, y: jnp.log2(jnp.abs(x)),
    "logistic": lambda x, y: lax.logistic(x),
    "polygamma": lambda x, y: lax.polygamma(jnp.round(jnp.abs(y)) + 1, jnp.abs(x) + 1),
    "pow": lambda x, y: lax.pow(jnp.abs(x) + 0.1, y),
    "rsqrt": lambda x, y: lax.rsqrt(jnp.abs(x)),
    "sin": lambda x, y: lax.sin(x),
    "sinh": lambda x, y: lax.sinh(x),
    "tan": lambda x, y: lax.tan(x),
    "tanh": lambda x, y: lax.tanh(x),
    "zeta": lambda x, y: lax.zeta(jnp.abs(x) + 1.5, jnp.abs(y) + 1),
}

WITHOUT_TEST = {"polynomial"}  # no function of jax.lax or jax.numpy makes one
