"""A server of a fake engine in a process of its own: python -m tests.serving.served_process STEP_S."""

import sys

from bijax.server.logs import set_up_logs
from bijax.server.model import ServedModel
from bijax.server.options import ServerOptions
from bijax.server.run import listen, serve
from bijax.server.service import Service
from tests.serving.fake_engine import LONGEST, VOCABULARY, ByteTokenizer, FakeEngine


async def open_engine() -> FakeEngine:
    return FakeEngine(step_s=float(sys.argv[1]))


def main() -> int:
    options = ServerOptions(port=0)
    listener = listen(options.host, options.port)
    set_up_logs("json")
    print(listener.getsockname()[1], flush=True)
    model = ServedModel("fake", "/models/fake", VOCABULARY, LONGEST, ByteTokenizer())
    return serve(Service(model, options, open_engine), listener)


if __name__ == "__main__":
    sys.exit(main())
