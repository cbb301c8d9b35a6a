"""Metrics for Prometheus, under vLLM's names where they mean the same."""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bijax.serving import EngineStats, RequestOutput

PREFIX = "vllm:"  # so that dashboards made for vLLM work
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_BETWEEN_TOKENS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_WHOLE_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Metrics:
    """Counts latencies, and reads the engine's numbers when they are requested.

    Args:
        model_name: The value of the label `model_name`.
        stats: Gives the engine's numbers; None while there is no engine.
    """

    def __init__(self, model_name: str, stats: Callable[[], EngineStats | None]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, stats))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, text, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(model_name)

        self._first = histogram("time_to_first_token_seconds", "Time to the first token.", _FIRST_TOKEN_S)
        self._between = histogram("inter_token_latency_seconds", "Time between tokens.", _BETWEEN_TOKENS_S)
        self._whole = histogram("e2e_request_latency_seconds", "Time of a whole request.", _WHOLE_S)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def latency(self) -> "Latency":
        """A stopwatch for one request, which starts now."""
        return Latency(self._first, self._between, self._whole)


class Latency:
    """Times one request."""

    def __init__(self, first: Histogram, between: Histogram, whole: Histogram) -> None:
        self._first, self._between, self._whole = first, between, whole
        self._start = time.monotonic()
        self._last: float | None = None
        self._tokens = 0

    def saw(self, output: RequestOutput) -> None:
        """Records the request's output so far."""
        now = time.monotonic()
        tokens = sum(len(completion.tokens) for completion in output.completions)
        new = tokens - self._tokens
        if new and self._last is None:
            self._first.observe(now - self._start)
        elif new and self._last is not None:
            for _ in range(new):  # tokens that come together share the time
                self._between.observe((now - self._last) / new)
        if new:
            self._last, self._tokens = now, tokens
        if output.finished:
            self._whole.observe(now - self._start)


class _EngineCollector(Collector):
    def __init__(self, model_name: str, stats: Callable[[], EngineStats | None]) -> None:
        self._model_name, self._stats = model_name, stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        if stats is None:
            return
        gauges = {
            "num_requests_running": ("Sequences that hold pages.", stats.num_running),
            "num_requests_waiting": ("Sequences that wait.", stats.num_waiting),
            "kv_cache_usage_perc": ("Fraction of the cache's pages in use; 1 is all.", stats.kv_cache_usage),
        }
        if stats.state_bytes:
            gauges |= {
                "state_bytes": ("Bytes of the state of a running sequence.", stats.state_bytes),
                "state_snapshot_bytes": ("Bytes of a snapshot of a state.", stats.snapshot_bytes),
                "state_snapshots": ("Snapshots of states that fit in memory.", stats.num_snapshots),
                "state_snapshots_used": ("Snapshots of states in use.", stats.snapshots_used),
            }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric([self._model_name], value)
            yield gauge
        counters = {
            "prefix_cache_queries": ("Tokens looked up in the prefix cache.", stats.prefix_queries),
            "prefix_cache_hits": ("Tokens found in the prefix cache.", stats.prefix_hits),
            "num_preemptions": ("Sequences that lost their pages.", stats.preemptions),
            "prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
            "generation_tokens": ("Tokens sampled.", stats.generated_tokens),
            "spec_decode_num_draft_tokens": ("Tokens drafted.", stats.drafted_tokens),
            "spec_decode_num_accepted_tokens": ("Drafted tokens accepted.", stats.accepted_tokens),
        }
        for name, (text, count) in counters.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric([self._model_name], count)
            yield counter
        success = CounterMetricFamily(PREFIX + "request_success", "Requests.", labels=["model_name", "finished_reason"])
        for reason in ("stop", "length", "abort"):
            success.add_metric([self._model_name, reason], stats.finished.get(reason, 0))
        yield success
