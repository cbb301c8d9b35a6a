"""Differential equations, linear systems, roots and minima: Diffrax, Lineax, Optimistix, Optax."""

import diffrax
import jax
import jax.numpy as jnp
import lineax
import optax
import optimistix

from benchmarks.gallery_programs.program import EXAMPLES, Function, Program, normal


def diffrax_adaptive() -> tuple[Function, jax.Array]:
    def field(t: jax.Array, y: jax.Array, args: None) -> jax.Array:
        prey, predator = y
        return jnp.stack([prey * (1.0 - predator), predator * (prey - 1.0)])

    def solve(y0: jax.Array) -> jax.Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(field),
            diffrax.Tsit5(),
            t0=0.0,
            t1=5.0,
            dt0=0.1,
            y0=y0,
            saveat=diffrax.SaveAt(ts=jnp.linspace(0.0, 5.0, 11)),
            stepsize_controller=diffrax.PIDController(rtol=1e-5, atol=1e-5),
        )
        return solution.ys

    return jax.vmap(solve), jnp.exp(normal(0, EXAMPLES, 2) / 3)


def lineax_gradients() -> tuple[Function, tuple[jax.Array, jax.Array]]:
    def solve(matrix: jax.Array, vector: jax.Array) -> jax.Array:
        operator = lineax.MatrixLinearOperator(matrix, lineax.positive_semidefinite_tag)
        return lineax.linear_solve(operator, vector, lineax.CG(rtol=1e-6, atol=1e-6)).value

    a = normal(0, EXAMPLES, 12, 12)
    return lambda batch: jax.vmap(solve)(*batch), (a @ a.mT + 12 * jnp.eye(12), normal(1, EXAMPLES, 12))


def optimistix_fits() -> tuple[Function, tuple[jax.Array, jax.Array]]:
    def residuals(w: jax.Array, data: tuple[jax.Array, jax.Array]) -> jax.Array:
        x, y = data
        return y - w[0] * jnp.exp(-w[1] * x) - w[2]

    def fit(x: jax.Array, y: jax.Array) -> jax.Array:
        solver = optimistix.LevenbergMarquardt(rtol=1e-5, atol=1e-5)
        return optimistix.least_squares(residuals, solver, jnp.array([1.0, 1.0, 0.0]), args=(x, y)).value

    x = jnp.tile(jnp.linspace(0.0, 3.0, 20), (EXAMPLES, 1))
    y = 2.0 * jnp.exp(-0.7 * x) + 0.5 + 0.05 * normal(0, EXAMPLES, 20)
    return lambda batch: jax.vmap(fit)(*batch), (x, y)


def optax_lbfgs() -> tuple[Function, tuple[jax.Array, jax.Array]]:
    optimizer = optax.lbfgs()

    def fit(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.mean((jnp.tanh(x @ w) - y) ** 2)

        value_and_grad = optax.value_and_grad_from_state(loss)

        def step(carry, _):
            w, state = carry
            value, grad = value_and_grad(w, state=state)
            updates, state = optimizer.update(grad, state, w, value=value, grad=grad, value_fn=loss)
            return (optax.apply_updates(w, updates), state), None

        w = jnp.zeros(16)
        return jax.lax.scan(step, (w, optimizer.init(w)), length=5)[0][0]

    return lambda batch: jax.vmap(fit)(*batch), (normal(0, EXAMPLES, 40, 16), jnp.tanh(normal(1, EXAMPLES, 40)))


PROGRAMS = (
    Program("diffrax: Tsit5 with adaptive steps", diffrax_adaptive),
    Program("lineax: conjugate gradients", lineax_gradients),
    Program("optimistix: Levenberg-Marquardt, a fit for each example", optimistix_fits),
    Program("optax: L-BFGS, a fit for each example", optax_lbfgs),
)
