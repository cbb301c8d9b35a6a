"""A server of the toy model in a process of its own: python -m tests.serving.toy_process '{"max_waiting": 8}'."""

import json
import sys

from bijax.server.logs import set_up_logs
from bijax.server.model import ServedModel
from bijax.server.options import ServerOptions
from bijax.server.run import listen, serve
from bijax.server.service import Service
from bijax.serving import AsyncEngine, Engine, EngineOptions
from bijax.serving.toy import ToyModel
from tests.serving.fake_engine import END, VOCABULARY, ByteTokenizer

SMALL = {"num_pages": 48, "page_size": 8, "max_running": 2, "max_prefill_tokens": 16, "max_length": 200}


def main() -> int:
    """Prints the port, and serves until a signal comes."""
    options = ServerOptions(port=0)
    engine_options = EngineOptions(**SMALL | json.loads(sys.argv[1]))
    listener = listen(options.host, options.port)
    set_up_logs("json")
    print(listener.getsockname()[1], flush=True)

    async def open_engine() -> AsyncEngine:
        model = ToyModel.random(seed=0, vocab_size=VOCABULARY, width=32, max_length=256)
        engine = Engine(model, tokenizer=ByteTokenizer(), eos_token_ids=[END], options=engine_options)
        engine.warm_up()
        return AsyncEngine(engine)

    model = ServedModel("toy", "/models/toy", VOCABULARY, 200, ByteTokenizer())
    return serve(Service(model, options, open_engine, engine_options), listener)


if __name__ == "__main__":
    sys.exit(main())
