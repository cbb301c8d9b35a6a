"""Several GPUs with the bits of one, against JAX's own products and psum on as many GPUs.

    python -m benchmarks.bench_parallel_gpu
    python -m benchmarks.bench_parallel_gpu --sections steps --shapes 8B --kinds prefill
    python -m benchmarks.bench_parallel_gpu --devices 4 --sections sums,steps,train

Models have the width of Llama 1B or 8B, few layers and a small vocabulary, and compute in bfloat16. Steps are queued:
the next one does not wait for the last. `device_us` is the time of the kernels of one GPU (of all, divided by
their number; a kernel that waits for another GPU counts as long as it waits).

| section | a cell is | `ours_us` | `xla_us` |
|---|---|---|---|
| sums | a float32 sum over the GPUs | `bijax.parallel.psum`, and the exchange that more than two GPUs use | `psum` |
| steps | a step of decoding, or a prompt | tensor parallelism over the GPUs | the same with JAX's operations |
| | | (`one_us`, `two_us`: one and two GPUs with the same bits; `chain_us`: one under the contract of one device) | |
| train | a step of training with cut examples | `bijax.parallel.accumulate_gradients` | a loop over units and `psum` |
| products | a product in 8 or 4 leaves on one GPU | one kernel for all leaves | XLA's product |
"""

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.device_time import device_time_us, kernel_table
from benchmarks.harness import add_json, queued_us, save, show
from benchmarks.leaf_products import Step, products
from benchmarks.model_steps import own_loss, plain_loss
from bijax import parallel
from bijax.lax import collectives
from flax_layers import INVARIANT, PLAIN, Llama, PartitionedLlama, partition
from flax_layers.checkpoint import LlamaConfig

AXIS: Final = "model"
SHAPES: Final = {"1B": (2048, 8192, 32, 64, 4), "8B": (4096, 14336, 32, 128, 2)}
"""Width, width of the MLP, heads, their size, layers."""
VOCABULARY: Final = 8192
CASES: Final = {
    "1B": (("decode", 1, 2048), ("decode", 8, 2048), ("decode", 64, 2048), ("prefill", 1, 2048)),
    "8B": (("decode", 1, 2048), ("decode", 8, 2048), ("decode", 64, 2048), ("prefill", 1, 2048)),
}
SUMS: Final = (1 << 12, 1 << 14, 1 << 18, 1 << 22)
"""Elements."""
UNIT, BATCH, LENGTH, TRAINED_LAYERS = 2, 16, 512, 2
THREADS: Final = 12
NUMBERS: Final = {"one": 1, "chain": 1, "two": 2}
"""Numbers of GPUs of the programs that do not use all of them."""
SECTIONS: Final = ("sums", "steps", "train", "products")

Run = Callable[[], Any]


def mesh(devices: int, axis: str = AXIS) -> Mesh:
    return jax.make_mesh((devices,), (axis,), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


@functools.cache
def model(shape: str, layers: int) -> Llama:
    hidden, inner, heads, size, _ = SHAPES[shape]
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=size,
        rope_theta=500000.0,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_ids=(),
    )
    return Llama(config, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, ops=INVARIANT, rngs=nnx.Rngs(0))


def tokens(batch: int, length: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, VOCABULARY, (batch, length)), jnp.int32)


def partitioned_step(cut: PartitionedLlama, kind: str, batch: int, keys: int) -> Step:
    def run(cache: Any, params: Any, tokens: jax.Array) -> Any:
        logits, new = cut.extend(params, tokens, cache)
        return logits[:, -1], dataclasses.replace(new, lengths=cache.lengths)

    new = 1 if kind == "decode" else keys
    whole = NamedSharding(cut.mesh, P())
    cache = cut.cache(batch=batch, capacity=keys)
    cache = dataclasses.replace(cache, lengths=jax.device_put(jnp.full(batch, keys - new, jnp.int32), whole))
    return Step(run, (cache,), (cut.params, jax.device_put(tokens(batch, new), whole)))


def chain_step(model: Llama, kind: str, batch: int, keys: int) -> Step:
    graph, params, others = nnx.split(model, nnx.Param, ...)

    def run(cache: Any, params: Any, others: Any, tokens: jax.Array) -> Any:
        logits, new = nnx.merge(graph, params, others).extend(tokens, cache)
        return logits[:, -1], dataclasses.replace(new, lengths=cache.lengths)

    new = 1 if kind == "decode" else keys
    cache = model.cache(batch=batch, capacity=keys)
    cache = dataclasses.replace(cache, lengths=jnp.full(batch, keys - new, jnp.int32))
    return Step(run, (cache,), (params, others, tokens(batch, new)))


def device_us(run: Run, devices: int) -> float:
    return round(sum(us for *_, us in kernel_table(run, 8)) / devices, 1)


def sums(devices: int) -> dict[str, dict[str, Step]]:
    """Returns the programs of the sums."""

    def summed(function: Callable[[jax.Array], jax.Array], elements: int) -> Step:
        on = mesh(devices)
        terms = jax.device_put(jnp.ones((devices, elements), jnp.float32), NamedSharding(on, P(AXIS)))
        return Step(jax.shard_map(function, mesh=on, in_specs=P(AXIS), out_specs=P()), (), (terms,))

    exchange = functools.partial(
        collectives._exchange, axes=(AXIS,), groups=None, n=devices, dtype="float32", to="invarying"
    )
    return {
        f"{4 * elements >> 10} KiB": {
            "ours": summed(lambda x: parallel.psum(x[0], AXIS), elements),
            "exchange": summed(lambda x: exchange(x[0]), elements),
            "xla": summed(lambda x: lax.psum(x[0], AXIS), elements),
        }
        for elements in SUMS
    }


def steps(shape: str, kinds: Sequence[str], devices: int) -> dict[str, dict[str, Step]]:
    """Returns the programs of a shape, of these kinds of steps."""
    whole = model(shape, SHAPES[shape][-1])
    cut = {n: partition(whole, mesh(n)) for n in sorted({1, 2, devices})}
    plain = cut[devices].with_ops(PLAIN)
    return {
        f"{kind} {batch}x{keys}": {
            "ours": partitioned_step(cut[devices], kind, batch, keys),
            "xla": partitioned_step(plain, kind, batch, keys),
            "one": partitioned_step(cut[1], kind, batch, keys),
            **(
                {"chain": chain_step(whole, kind, batch, keys)}
                if devices == 2
                else {"two": partitioned_step(cut[2], kind, batch, keys)}
            ),
        }
        for kind, batch, keys in CASES[shape]
        if kind in kinds
    }


def training(devices: int) -> dict[str, dict[str, Step]]:
    """Returns the programs of a training step with cut examples."""
    whole = model("1B", TRAINED_LAYERS)
    on = mesh(devices, "data")

    def scored(ops: Any, loss: Any) -> tuple[Any, Any, Any]:
        graph, params, others = nnx.split(nnx.with_attributes(whole, ops=ops), nnx.Param, ...)

        def of(params: Any, others: Any, tokens: jax.Array) -> jax.Array:
            return loss(nnx.merge(graph, params, others)(tokens[:, :-1]), tokens[:, 1:])

        return of, params, others

    own, params, others = scored(INVARIANT, own_loss)
    other, *_ = scored(PLAIN, plain_loss)
    ordered = parallel.accumulate_gradients(own, unit=UNIT, axis="data", batch_argnums=2)

    def by_loop(params: Any, others: Any, tokens: jax.Array) -> Any:
        def add(total: Any, unit: jax.Array) -> tuple[Any, None]:
            found = jax.value_and_grad(other)(params, others, unit)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, found), None

        params, others = lax.pcast((params, others), "data", to="varying")
        units = tokens.shape[0] // UNIT
        start = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), (jnp.float32(0), params))
        start = lax.pcast(start, "data", to="varying")
        (value, slopes), _ = lax.scan(add, start, tokens.reshape(units, UNIT, -1))
        return jax.tree.map(lambda x: lax.psum(x, "data") / (devices * units), (value, slopes))

    def step(gradient: Callable[..., Any]) -> Step:
        def run(params: Any, others: Any, tokens: jax.Array) -> Any:
            value, slopes = gradient(params, others, tokens)
            return value, jax.tree.map(lambda p, g: p - (1e-3 * g).astype(p.dtype), params, slopes)

        mapped = jax.shard_map(run, mesh=on, in_specs=(P(), P(), P("data")), out_specs=P())
        copied = jax.device_put(jax.tree.map(jnp.copy, params), NamedSharding(on, P()))
        given = jax.device_put(others, NamedSharding(on, P()))
        examples = jax.device_put(tokens(BATCH, LENGTH + 1), NamedSharding(on, P("data")))
        return Step(mapped, (copied,), (given, examples))

    return {f"data parallel {BATCH}x{LENGTH}": {"ours": step(lambda *a: ordered(*a)), "xla": step(by_loop)}}


def measured(what: str, shape: str, devices: int, made: dict[str, dict[str, Step]]) -> Iterator[dict[str, Any]]:
    """Yields the cells of programs that are compiled."""
    for case, runs in made.items():
        used = {name: NUMBERS.get(name, devices) for name in runs}
        cell: dict[str, Any] = {"what": what, "shape": shape, "case": case}
        if what != "products":
            cell["devices"] = devices
        on_device = {
            name: device_time_us(lambda run=run: run(), [()], 12) if what == "products" else device_us(run, used[name])
            for name, run in runs.items()
        }
        if what == "products":  # below, the host is what takes time
            times = {name: round(us, 1) for name, us in on_device.items()}
        else:
            found = queued_us(list(runs.values()), repeats=20 if "prefill" in case else 40, rounds=5)
            times = dict(zip(runs, (round(us, 1) for us in found), strict=True))
            cell |= {f"{name}_device_us": us for name, us in on_device.items()}
        cell |= {f"{name}_us": us for name, us in times.items()}
        if what == "steps":
            cell["of_one"] = round(times["one"] / times["ours"], 3)
            if "chain" in times:
                cell["of_chain"] = round(times["chain"] / times["one"], 3)
            if "two" in times:
                cell["of_two"] = round(times["two"] / times["ours"], 3)
        yield cell | {"ratio": round(times["xla"] / times["ours"], 3)}


def made_of(
    section: str, shapes: Sequence[str], kinds: Sequence[str], devices: int
) -> Iterator[tuple[str, dict[str, dict[str, Step]]]]:
    """Yields a shape and the programs of a section."""
    if section == "steps":
        yield from ((shape, steps(shape, kinds, devices)) for shape in shapes)
        return
    make = {"sums": lambda: sums(devices), "train": lambda: training(devices), "products": products}[section]
    yield "1B" if section == "train" else "", make()


def main() -> None:
    parser = argparse.ArgumentParser(description="Several GPUs with the bits of one.")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--shapes", default=",".join(SHAPES), help="of the models whose steps are timed")
    parser.add_argument("--kinds", default="decode,prefill", help="of the steps")
    parser.add_argument("--devices", type=int, default=2, help="number of GPUs: 2, 4 or 8")
    parser.add_argument("--lower", action="store_true", help="only lower the programs: fills JAX's compilation cache")
    add_json(parser)
    arguments = parser.parse_args()
    devices = arguments.devices
    if len(jax.devices()) < devices:
        parser.error(f"expected {devices} GPUs, got {len(jax.devices())}")
    rows = []
    with ThreadPoolExecutor(THREADS) as pool:
        for section in arguments.sections.split(","):
            shapes, kinds = arguments.shapes.split(","), arguments.kinds.split(",")
            for shape, made in made_of(section, shapes, kinds, devices):
                each = [run for runs in made.values() for run in runs.values()]
                # XLA tunes on the GPU while it compiles: before anything is timed.
                list(pool.map(lambda run: run.lower() if arguments.lower else run.compile(), each))
                print("lowered" if arguments.lower else "compiled", section, shape, flush=True)
                for row in [] if arguments.lower else measured(section, shape, devices, made):
                    print(row, flush=True)
                    rows.append(row)
                if rows:
                    save("parallel", rows, arguments.json)
    show("parallel", rows)


if __name__ == "__main__":
    main()
