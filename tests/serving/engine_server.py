"""A server of a small model on the engine of bijax."""

from bijax.serving import AsyncEngine, Engine, EngineOptions
from bijax.serving.toy import ToyModel
from tests.serving.fake_engine import END, LONGEST, VOCABULARY, ByteTokenizer
from tests.serving.live import live

# Few sizes, because each is compiled.
OPTIONS = {"num_pages": 48, "page_size": 8, "max_running": 2, "max_prefill_tokens": 16, "max_length": 200}


def toy(seed):
    return ToyModel.random(seed=abs(seed), vocab_size=VOCABULARY, width=32 if seed >= 0 else 64, max_length=256)


def serve(seed=0, longest=LONGEST, **options):
    engine_options = EngineOptions(**OPTIONS | options)

    async def open_engine():
        engine = Engine(toy(seed), tokenizer=ByteTokenizer(), eos_token_ids=[END], options=engine_options)
        return AsyncEngine(engine)

    return live(
        open_engine=open_engine,
        engine_options=engine_options,
        longest=longest,
        load_weights=lambda path: toy(int(path)),
    )
