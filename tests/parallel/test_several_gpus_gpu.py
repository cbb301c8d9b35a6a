"""Several GPUs of one process have the bits of one, and plain JAX on them has not.

The checks that `on_devices` makes on devices of a CPU, and models, engines and programs that XLA partitions, with the
kernels of the GPU and with NCCL.
"""

import asyncio
import functools
import re
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bijax
from bijax import parallel
from bijax.lax import collectives
from bijax.server.replicas import Replicas
from bijax.serving import AsyncEngine, DisaggregatedEngine, Engine, EngineOptions, RequestOutput, SamplingParams
from bijax.testing import assert_bits_equal
from flax_layers import PLAIN, Llama, PartitionedLlama, ServedLlama, partition
from flax_layers.checkpoint import LlamaConfig
from tests.parallel import on_devices
from tests.parallel.on_devices import AXIS, array, differing, mesh, sharded

DEVICES: Final = len(jax.devices())
COUNTS: Final = tuple(n for n in (2, 4, 8) if n <= DEVICES) or (2,)
"""Numbers of GPUs that are compared with one: all powers of two that this machine has."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICES < 2, reason=f"needs two GPUs of one process, got {DEVICES} device"),
]

over_counts: Final = pytest.mark.parametrize("devices", COUNTS)

CONFIG: Final = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=1024,
    num_layers=1,
    num_heads=8,
    num_kv_heads=8,
    head_dim=64,
    rope_theta=10000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_ids=(2,),
)
LENGTH, PROMPT = 24, 17
OPTIONS: Final = EngineOptions(page_size=16, num_pages=12, max_running=2, max_prefill_tokens=32, max_length=64)
PROMPTS: Final = [[1, 5, 9, 7], [3, 3, 2, 1, 8, 9, 40, 41, 42, 5, 6, 7, 7, 7, 8, 8, 9, 9, 10]]
PARAMS: Final = SamplingParams(max_new_tokens=4, seed=3, logprobs=True, top_logprobs=2)


@functools.cache
def llama() -> Llama:
    return Llama(CONFIG, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))


@functools.cache
def cut(devices: int) -> PartitionedLlama:
    return partition(llama(), mesh(devices), axis=AXIS)


TOKENS: Final = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, LENGTH))


@pytest.mark.parametrize(
    ("dtype", "inner", "huge"),
    [
        pytest.param(jnp.bfloat16, 8 * 128, False, id="bfloat16"),
        pytest.param(jnp.bfloat16, 8 * 43, False, id="bfloat16, leaves of 43"),
        pytest.param(jnp.float16, 8 * 64, False, id="float16"),
        pytest.param(jnp.float32, 8 * 43, False, id="float32"),
        pytest.param(jnp.float32, 8 * 24, True, id="float32, huge"),
    ],
)
def test_products(dtype: Any, inner: int, huge: bool) -> None:
    on_devices.products(dtype, inner, COUNTS, (False, True), huge=huge)


@pytest.mark.parametrize("transpose_w", [False, True])
def test_products_of_many_rows(transpose_w: bool) -> None:
    """Decoding and prefill: with one row, with several, and with blocks of them."""
    x, w = array(1, 2048, 4096, dtype=jnp.bfloat16), array(2, 4096, 1024, dtype=jnp.bfloat16)
    w = w.T if transpose_w else w

    def product(axis: str | None, x: jax.Array, w: jax.Array) -> jax.Array:
        return parallel.row_parallel(x, w, axis, transpose_w=transpose_w)

    def plain(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.psum(x @ (w.T if transpose_w else w), AXIS)

    specs = (P(None, AXIS), P(None, AXIS) if transpose_w else P(AXIS))
    whole = jax.jit(functools.partial(product, None))(x, w)
    assert_bits_equal(whole, jax.jit(lambda x, w: bijax.matmul(x, w, split_k=8, transpose_w=transpose_w))(x, w))
    for devices in COUNTS:
        run = sharded(functools.partial(product, AXIS), devices, specs, P())
        for rows in (1, 8, 64, 2048):
            assert_bits_equal(run(x[:rows], w), whole[:rows])
    assert differing(*(sharded(plain, n, specs, P())(x, w) for n in (1, COUNTS[-1]))), "plain JAX has the same bits"


def test_sums() -> None:
    on_devices.sums((1, *COUNTS))


@pytest.mark.parametrize("elements", [64, 1 << 14, 1 << 18, 3 << 20], ids=str)
def test_forms_of_a_sum(elements: int) -> None:
    """XLA's all-reduce of two devices, in each of its forms, has the bits of the exchange, with nan and infinities."""
    x = array(1, 2, elements, huge=True).at[0, 1].set(jnp.nan).at[1, 2].set(-0.0).at[0, 2].set(-0.0)
    options: dict[str, Any] = {"axes": (AXIS,), "to": "invarying"}
    exchange = functools.partial(collectives._exchange, groups=None, n=2, **options)
    for dtype in ("float32", "bfloat16"):
        exchanged, reduced, chosen = (
            sharded(lambda x, form=form, dtype=dtype: form(x[0], dtype=dtype), 2, P(AXIS), P())(x)
            for form in (
                exchange,
                functools.partial(collectives._all_reduce, **options),
                lambda x, dtype: parallel.psum(x, AXIS, dtype=dtype),
            )
        )
        assert_bits_equal(exchanged, jax.jit(lambda x, dtype=dtype: parallel.tree_sum(x, dtype=dtype))(x))
        assert_bits_equal(reduced, exchanged)
        assert_bits_equal(chosen, exchanged)


def test_sums_of_sums() -> None:
    """XLA may add before it reduces; the sums of an invariant program stay as they are written."""
    x, y = array(1, 2, 4096), array(2, 2, 4096)

    def added(x: jax.Array, y: jax.Array) -> Any:
        return lax.psum(x[0], AXIS) + lax.psum(y[0], AXIS), lax.pmax(x[0], AXIS), lax.psum(x[0].astype(jnp.int32), AXIS)

    def expected(x: np.ndarray, y: np.ndarray) -> Any:
        return (x[0] + x[1]) + (y[0] + y[1]), x.max(0), x.astype(np.int32).sum(0, dtype=np.int32)

    wanted = expected(np.asarray(x), np.asarray(y))
    specs = (P(AXIS), P(AXIS)), P()
    for check_vma in (True, False):
        mapped = jax.shard_map(added, mesh=mesh(2), in_specs=specs[0], out_specs=specs[1], check_vma=check_vma)
        assert_bits_equal(jax.jit(bijax.invariant(mapped))(x, y), wanted)
        with bijax.set_batch_invariant_mode():
            assert_bits_equal(jax.jit(mapped)(x, y), wanted)

    def by_hand(x: jax.Array, y: jax.Array) -> jax.Array:
        return parallel.psum(x[0], AXIS) + parallel.psum(y[0], AXIS)

    assert_bits_equal(sharded(by_hand, 2, *specs)(x, y), wanted[0])
    of_devices = np.asarray(x) + np.asarray(y)
    assert (of_devices[0] + of_devices[1] != wanted[0]).any(), "the order has no effect"


def test_weights_of_leaves() -> None:
    on_devices.weights_of_leaves((1, *COUNTS))


def test_vocabulary() -> None:
    on_devices.vocabulary((1, *COUNTS))


@over_counts
def test_experts(devices: int) -> None:
    on_devices.experts_cut(devices)


@over_counts
def test_gradients_of_a_batch(devices: int) -> None:
    on_devices.gradients_of_a_batch(devices)


def network(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.nn.softmax(jax.nn.gelu(x @ up) @ down, axis=-1)


def collectives_of(compiled: Any) -> set[str]:
    return set(re.findall(r" (all-[a-z]+|reduce-scatter|collective-[a-z]+)(?:-start)?\(", compiled.as_text()))


@over_counts
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_automatic_sharding(dtype: Any, devices: int) -> None:
    """Rows that are cut stay where they are; sums that are cut are gathered."""
    given = array(1, 64, 512, dtype=dtype), array(2, 512, 256, dtype=dtype) / 16, array(3, 256, 512, dtype=dtype) / 16
    function = bijax.invariant(network)
    expected = jax.jit(function)(*given)
    on = mesh(devices)

    def put(*specs: P) -> list[jax.Array]:
        return [jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(given, specs, strict=True)]

    rows, sums = put(P(AXIS), P(), P()), put(P(None, AXIS), P(AXIS), P())
    compiled = jax.jit(function).lower(*rows).compile()
    assert collectives_of(compiled) == set()
    result = compiled(*rows)
    assert result.sharding.spec[0] == AXIS
    assert_bits_equal(result, expected)
    assert_bits_equal(jax.jit(function)(*sums), expected)
    gradient = bijax.invariant(jax.grad(lambda *a: jnp.log(network(*a)).mean(), (1, 2)))
    assert_bits_equal(jax.jit(gradient)(*rows), jax.jit(gradient)(*given))
    if dtype == jnp.float32:
        assert differing(jax.jit(network)(*sums), jax.jit(network)(*given)), "plain JAX has the same bits"


def trained(model: PartitionedLlama) -> Any:
    """Returns the loss, the logits and the gradients of all parameters."""

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        logits = model.logits(params, TOKENS)
        rows = logits[:, :-1].reshape(-1, logits.shape[-1])
        losses = bijax.softmax_cross_entropy(rows, jnp.asarray(TOKENS[:, 1:].reshape(-1)))
        return bijax.sum(losses, axis=0), logits

    (total, logits), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(model.params)
    return total, logits, model.whole(grads)


@over_counts
def test_training_of_a_model(devices: int) -> None:
    assert_bits_equal(trained(cut(devices)), trained(cut(1)))


def served(model: PartitionedLlama) -> Any:
    """Returns the logits of a prompt and of tokens after it, and the cache."""
    extend = jax.jit(model.extend)
    logits, cache = extend(model.params, TOKENS[:, :PROMPT], model.cache(batch=2, capacity=32))
    found = [logits]
    for i in range(PROMPT, PROMPT + 3):
        logits, cache = extend(model.params, TOKENS[:, i : i + 1], cache)
        found.append(logits)
    return found, cache.keys, cache.values


@over_counts
def test_prefill_and_decoding_of_a_model(devices: int) -> None:
    one = served(cut(1))
    assert_bits_equal(served(cut(devices)), one)
    plain = [served(cut(n).with_ops(PLAIN)) for n in (1, devices)]
    assert differing(*(logits for logits, *_ in plain)), "plain JAX has the same bits"


def found(output: RequestOutput) -> list[Any]:
    """Returns the tokens of a request and their log-probabilities."""
    [done] = output.completions
    rows = [[e.logprob, *(value for value, _ in e.top)] for e in done.logprobs]
    return [np.array(done.tokens), *(np.array(row, np.float32) for row in rows)]


def generated(engine: Engine) -> list[Any]:
    """Returns the results of requests together, which are those of each alone."""
    together = [found(output) for output in engine.generate(PROMPTS, PARAMS)]
    engine.flush_cache()
    assert_bits_equal([found(engine.generate([prompt], PARAMS)[0]) for prompt in PROMPTS], together)
    return together


def on_gpus(first: int, end: int) -> Mesh:
    return Mesh(np.array(jax.devices()[first:end]), ("model",))


def engine(on: Mesh, **changes: Any) -> Engine:
    return Engine(ServedLlama(llama()), options=EngineOptions(**{**vars(OPTIONS), **changes}), mesh=on)


@over_counts
def test_tensor_parallel_engine(devices: int) -> None:
    assert_bits_equal(generated(engine(on_gpus(0, devices))), generated(engine(on_gpus(0, 1))))


def test_data_parallel_engines() -> None:
    """Each of two engines has a GPU of its own; and one of them computes prompts for the other."""
    engines = [engine(on_gpus(number, number + 1)) for number in (0, 1)]
    expected = generated(engines[0])
    assert_bits_equal(generated(engines[1]), expected)
    for each in engines:
        each.flush_cache()
    both = DisaggregatedEngine(prefill=engines[0], decode=engines[1])
    assert_bits_equal([found(output) for output in both.generate(PROMPTS, PARAMS)], expected)

    async def replicated() -> list[Any]:
        replicas = Replicas([AsyncEngine(each) for each in engines])

        async def ask(number: int) -> Any:
            stream = replicas.stream(PROMPTS[number % 2], PARAMS, request_id=str(number))
            return found([output async for output in stream][-1])

        results = await asyncio.gather(*map(ask, range(4)))
        await replicas.close()
        return list(results)

    results = asyncio.run(asyncio.wait_for(replicated(), 120))
    assert_bits_equal(results, expected * 2)


def test_plain_engine() -> None:
    """The control of both."""
    one, two = (
        found(engine(on_gpus(0, end), enable_deterministic_inference=False).generate(PROMPTS[:1], PARAMS)[0])
        for end in (1, COUNTS[-1])
    )
    with pytest.raises(AssertionError):
        assert_bits_equal(two, one)
