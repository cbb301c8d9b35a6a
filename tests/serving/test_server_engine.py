"""The server on the real engine, with a tiny model: the same request, the same bits, whatever the traffic."""

import pytest

from bijax.serving import AsyncEngine, Engine, EngineOptions
from bijax.serving.toy import ToyModel
from tests.serving.determinism_client import MODES, Client, run
from tests.serving.fake_engine import END, VOCABULARY, ByteTokenizer
from tests.serving.live import live

OPTIONS = {"num_pages": 48, "page_size": 8, "max_running": 4, "max_prefill_tokens": 32, "max_length": 200}
PREFIXES = (1, 31, 64, 97)


def serve(seed=0, load_weights=None, **options):
    async def open_engine():
        model = ToyModel.random(seed=seed, vocab_size=VOCABULARY, width=32, max_length=256)
        engine = Engine(
            model, tokenizer=ByteTokenizer(), eos_token_ids=[END], options=EngineOptions(**OPTIONS, **options)
        )
        return AsyncEngine(engine)

    return live(open_engine=open_engine, load_weights=load_weights)


@pytest.fixture(scope="module")
def server():
    with serve(load_weights=lambda path: ToyModel.random(seed=int(path), vocab_size=VOCABULARY, width=32)) as running:
        yield running


def idle(server):
    stats = server.engine.stats()
    return stats.num_running == stats.num_waiting == 0 and stats.kv_cache_usage == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_every_mode_of_the_determinism_client_finds_one_answer(server, mode, temperature):
    client = Client(server.url, max_new_tokens=6, temperature=temperature, prefixes=PREFIXES)
    lines = []
    assert set(run(client, mode, 5, lines.append)) == {1}
    assert all(line.endswith("Unique samples: 1") for line in lines)


def test_the_client_finds_what_differs():
    """The control: answers of a server with other weights are other ones."""
    with serve(seed=1) as other, serve(seed=2) as another:
        clients = [Client(running.url, max_new_tokens=6) for running in (other, another)]
        assert len({client.answers(["abc"])[0] for client in clients}) == 2
