"""Graph networks. A batch of graphs is one graph with the concatenated nodes and edges."""

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from benchmarks.gallery_programs.program import EXAMPLES, Function, Program, normal

NODES, EDGES, WIDTH = 12, 40, 64
Graphs = dict[str, jax.Array]


def _graphs() -> Graphs:
    random = np.random.default_rng(0)
    ends = jnp.asarray(random.integers(0, NODES, (2, EXAMPLES, EDGES)))
    nodes, edges = normal(1, EXAMPLES, NODES, WIDTH), normal(2, EXAMPLES, EDGES, WIDTH)
    return {"nodes": nodes, "edges": edges, "senders": ends[0], "receivers": ends[1]}


def _of_graphs(net) -> tuple[Function, Graphs]:
    """Batches the graphs as `jraph.batch` does, which is for arrays outside jit."""

    def apply(graphs: Graphs) -> jax.Array:
        n = graphs["nodes"].shape[0]
        first = NODES * jnp.arange(n)[:, None]
        batched = jraph.GraphsTuple(
            nodes=graphs["nodes"].reshape(n * NODES, -1),
            edges=graphs["edges"].reshape(n * EDGES, -1),
            senders=(graphs["senders"] + first).reshape(-1),
            receivers=(graphs["receivers"] + first).reshape(-1),
            globals=None,
            n_node=jnp.full(n, NODES),
            n_edge=jnp.full(n, EDGES),
        )
        return net(batched).nodes.reshape(n, NODES, -1)

    return apply, _graphs()


def jraph_gcn() -> tuple[Function, Graphs]:
    w = normal(3, WIDTH, WIDTH) / 8
    return _of_graphs(jraph.GraphConvolution(lambda nodes: nodes @ w, add_self_edges=True))


def jraph_gat() -> tuple[Function, Graphs]:
    w, a = normal(3, WIDTH, WIDTH) / 8, normal(4, 2 * WIDTH, 1) / 8

    def logits(sent: jax.Array, received: jax.Array, edges: jax.Array) -> jax.Array:
        return jax.nn.leaky_relu(jnp.concatenate([sent, received], -1) @ a)

    return _of_graphs(jraph.GAT(lambda nodes: nodes @ w, logits, jax.nn.relu))


def jraph_interaction() -> tuple[Function, Graphs]:
    w_edge, w_node = normal(3, 3 * WIDTH, WIDTH) / 14, normal(4, 2 * WIDTH, WIDTH) / 11

    def update_edge(edges: jax.Array, sent: jax.Array, received: jax.Array) -> jax.Array:
        return jax.nn.relu(jnp.concatenate([edges, sent, received], -1) @ w_edge)

    def update_node(nodes: jax.Array, received: jax.Array) -> jax.Array:
        return jax.nn.relu(jnp.concatenate([nodes, received], -1) @ w_node)

    return _of_graphs(jraph.InteractionNetwork(update_edge, update_node))


PROGRAMS = (
    Program("jraph: graph convolution", jraph_gcn),
    Program("jraph: graph attention", jraph_gat),
    Program("jraph: interaction network", jraph_interaction),
)
