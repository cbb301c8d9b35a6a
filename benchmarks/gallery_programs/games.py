"""Games and searches."""

import jax
import jax.numpy as jnp
import mctx
import pgx

from benchmarks.gallery_programs.program import EXAMPLES, Function, Program, normal


def pgx_policy() -> tuple[Function, tuple[jax.Array, jax.Array]]:
    env = pgx.make("connect_four")
    w1, w2 = normal(0, 84, 64) / 9, normal(1, 64, 7) / 8

    def play(key: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(state, key):
            logits = jnp.tanh(state.observation.astype(jnp.float32).reshape(84) @ w1) @ w2 + place
            action = jax.random.categorical(key, jnp.where(state.legal_action_mask, logits, -jnp.inf))
            state = env.step(state, action)
            return state, (jax.nn.log_softmax(logits), state.rewards)

        first, key = jax.random.split(key)
        return jax.lax.scan(step, env.init(first), jax.random.split(key, 12))[1]

    return lambda batch: jax.vmap(play)(*batch), (jax.random.split(jax.random.key(0), EXAMPLES), normal(2, EXAMPLES, 7))


def mctx_search() -> tuple[Function, jax.Array]:
    w1, w2, w3 = normal(0, 20, 16) / 4, normal(1, 16, 4) / 4, normal(2, 16) / 4

    def recurrent(params: None, key: jax.Array, action: jax.Array, embedding: jax.Array):
        x = jnp.concatenate([embedding, jax.nn.one_hot(action, 4)], -1)
        embedding = jnp.tanh(x @ w1)
        output = mctx.RecurrentFnOutput(
            reward=embedding[:, 0],
            discount=jnp.full(len(action), 0.9),
            prior_logits=embedding @ w2,
            value=embedding @ w3,
        )
        return output, embedding

    def search(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        root = mctx.RootFnOutput(prior_logits=x @ w2, value=x @ w3, embedding=x)
        # Without noise: mctx draws it for the whole batch.
        policy = mctx.muzero_policy(
            None, jax.random.key(0), root, recurrent, num_simulations=8, dirichlet_fraction=0.0, temperature=0.0
        )
        return policy.action_weights, policy.search_tree.summary().value

    return search, normal(3, EXAMPLES, 16)


PROGRAMS = (
    Program("pgx: Connect Four played by a network", pgx_policy),
    Program("mctx: MuZero's search", mctx_search),
)
