"""The engine: requests in, tokens out, step by step."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jax.sharding import Mesh

from bijax.serving.accept import accept
from bijax.serving.batches import cut
from bijax.serving.build import build_programs, build_scheduler, build_states
from bijax.serving.cache_size import StateBytes, choose_num_pages
from bijax.serving.drafting import draft_after
from bijax.serving.errors import EngineError, QueueFullError
from bijax.serving.grammar import Grammars
from bijax.serving.model import Model, Tokenizer, adapter_names
from bijax.serving.offline import serve_all
from bijax.serving.options import EngineOptions
from bijax.serving.outputs import EngineStats, FinishReason, RequestOutput
from bijax.serving.params import SamplingParams
from bijax.serving.programs import Programs
from bijax.serving.requests import check_engine, make_request, on_mesh, overlapped, params_of
from bijax.serving.scheduler import Scheduler
from bijax.serving.sequence import Request
from bijax.serving.step import Step


class Engine:
    """Serves requests together, each with the bits that it would get alone.

    It runs in the calling thread and starts no thread; see `AsyncEngine` for servers. Its methods must not be called by
    two threads at once.

    Args:
        model: The model.
        tokenizer: For texts and stop strings; None where tokens are enough.
        eos_token_ids: Tokens that end an output, unless a request ignores them.
        options: Its options.
        mesh: Devices to cut the weights and the cache over, which the model's method `partitioned` does; for
            `flax_layers.ServedLlama` a mesh with an axis "model", and for experts another axis "expert". None for a
            model on one device, or one that is cut already.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the options do not fit the model, for example drafts of a head that it does not have, there is no
            memory for the cache, the model cannot be cut over the mesh, or overlap is requested and its experts are not
            on several devices.

    Attributes:
        options: The same, with the number of pages that the cache has.

    Guarantee: tokens, texts and the bits of log-probabilities of a request depend on the request, its seed, the weights
    of the model and of its own adapter, and the option `enable_deterministic_inference` alone: not on other requests,
    their order, number and adapters, chunks, the cache and its pages, preemption, speculation, or time. With a
    model that is cut over devices they do not depend on the number of devices, and differ from those without a mesh
    (`flax_layers.partition`). A request that names no seed and has a temperature gets a random one, so that eight such
    requests are eight samples; `Completion.seed` has it. The options `default_seed` and `seed_from_prompt` make these
    reproducible too.

    Example:
        >>> from bijax.serving.toy import ToyModel
        >>> engine = Engine(ToyModel.random(seed=0), options=EngineOptions(num_pages=32, max_running=2))
        >>> [output] = engine.generate([[1, 2, 3]], SamplingParams(max_new_tokens=4))
        >>> len(output.completions[0].tokens), output.completions[0].finish_reason
        (4, 'length')
    """

    def __init__(
        self,
        model: Model,
        *,
        tokenizer: Tokenizer | None = None,
        eos_token_ids: Iterable[int] = (),
        options: EngineOptions | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        check_engine(model, eos_token_ids, options)
        model = model if mesh is None else on_mesh(model, mesh)
        options = EngineOptions() if options is None else options
        model = overlapped(model, options)
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(eos_token_ids)
        self.max_length = min(model.max_length, options.max_length or model.max_length)
        self.num_pages = choose_num_pages(model, options, max_length=self.max_length)
        self.options = dataclasses.replace(options, num_pages=self.num_pages)
        self.weight_version = "default"
        self._model = model
        self._state_bytes = StateBytes.of(model)
        self._states = build_states(model, self.options)
        self._scheduler = build_scheduler(self.options, self.num_pages, self._states)
        self._programs = build_programs(
            model, self.options, num_pages=self.num_pages, max_length=self.max_length, states=self._states
        )
        # Drafts follow from the last tokens, which must be read for that.
        self._ahead = self.options.dispatch_ahead and not self.options.speculative_tokens
        self._in_flight: Step | None = None
        self._grammars = Grammars(tokenizer, model.vocab_size, self.eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._steps = 0
        self._paused = False
        self._interrupted = False
        self._counts: Counter[str] = Counter()
        self._finished: Counter[FinishReason] = Counter()

    @property
    def model(self) -> Model:
        """The model."""
        return self._model

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, which allocates pages to sequences."""
        return self._scheduler

    @property
    def programs(self) -> Programs:
        """The compiled programs and the cache."""
        return self._programs

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the model."""
        return self._model.vocab_size

    @property
    def has_work(self) -> bool:
        """Whether a step would compute something, or return the results of the last one."""
        return self._in_flight is not None or (bool(self._requests) and not self._paused)

    @property
    def max_request_tokens(self) -> int:
        """Longest sequence that model and cache have room for."""
        return min(self.max_length, self.num_pages * self.options.page_size)

    def add(
        self,
        prompt_tokens: Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Adds a request.

        Args:
            prompt_tokens: At least one token.
            params: What it asks for.
            request_id: Its name, which no unfinished request may have; by default a new one is generated.
            priority: Lower values run first. A request moves up one priority for every `aging_steps` steps that it
                waits, so that none starves.

        Returns:
            The name.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If a token is outside the vocabulary, the prompt is too long, or the name is taken.
            QueueFullError: If too many sequences wait.
        """
        params = SamplingParams() if params is None else params
        name = f"request-{self._arrivals}" if request_id is None else request_id
        if name in self._requests:
            raise ValueError(f"Engine: request_id {name!r} is that of a request that is not finished.")
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise TypeError(f"Engine: priority must be an integer, got {priority!r}.")
        request = make_request(
            name,
            prompt_tokens,
            params,
            key=(self._steps + priority * self.options.aging_steps, self._arrivals),
            vocab_size=self.vocab_size,
            longest=self.max_request_tokens,
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            default_seed=self.options.default_seed,
            seed_from_prompt=self.options.seed_from_prompt,
            grammars=self._grammars,
            adapters=adapter_names(self._model),
        )
        if params.embedding and not hasattr(self._model, "embed"):
            raise ValueError(
                f"SamplingParams: embedding must be False with a model that has no method embed, got True with"
                f" {type(self._model).__name__}."
            )
        waiting = len(self._scheduler.waiting)
        if waiting and waiting + params.n > self.options.max_waiting:
            raise QueueFullError(
                f"{waiting} sequences wait, and {params.n} more would be above max_waiting={self.options.max_waiting};"
                " try again later."
            )
        with self.recoverable():
            self._arrivals += 1
            self._requests[name] = request
            for sequence in request.sequences:
                self._scheduler.add(sequence)
            self._counts["prompt_tokens"] += len(request.prompt)
        return name

    def step(self, watched: Container[str] | None = None) -> list[RequestOutput]:
        """Dispatches one step; returns the cumulative outputs of the requests that received something.

        Args:
            watched: Requests whose outputs are returned before they are finished; all by default. Outputs
                that are not needed cost time.

        With `dispatch_ahead` these are the previous step's results, so that the device has work while the host reads
        and plans. If a request turns out to have ended by then, for example at a stop string, the token that the new
        step samples for it is dropped.

        A step that is interrupted, by an error or by Ctrl-C, may have donated the cache and lost sampled tokens.
        Requests stay, and the next step computes them again from the start.

        Raises:
            EngineError: If requests wait and none can be scheduled, which is a bug in the engine.
        """
        with self.recoverable():
            return self._step(watched)

    def _step(self, watched: Container[str] | None) -> list[RequestOutput]:
        ready, self._in_flight = self._in_flight, None
        if not self._paused:
            self._steps += 1
            works = self._scheduler.plan()
            if not works and ready is None and self._requests:
                raise EngineError(
                    f"none of {len(self._requests)} requests could be given work; this is a bug in bijax."
                )
            if works:
                self._restore_states()
                step = Step(self._programs, cut(works, self._programs.sizes), self.weight_version)
                self._scheduler.dispatched(works)
                self._keep_states()
                if self._ahead:
                    self._in_flight = step
                else:
                    ready = step
        outputs = [] if ready is None else self._take(ready, watched)
        self._keep_states()
        if ready is not None:
            draft_after(ready, self._programs, self.options.page_size)
        return outputs

    def _restore_states(self) -> None:
        """Copies snapshots to the slots of sequences that continue from them."""
        if self._states is not None and self._states.restores:
            self._programs.restore(self._states.restores)
            self._states.restores.clear()

    def _keep_states(self) -> None:
        """Copies the states that are kept, before a step changes them."""
        if self._states is not None and self._states.keeps:
            self._programs.keep(self._states.keeps)
            self._states.keeps.clear()

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request and frees its pages; returns its output so far, or None if there is no such request."""
        with self.recoverable():
            request = self._requests.get(request_id)
            if request is None:
                return None
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    sequence.finish("abort")
                    self._scheduler.remove(sequence)
            return self._finish(request)

    def pause(self) -> None:
        """Makes steps dispatch nothing until `resume`. Requests keep their pages."""
        self._paused = True

    def resume(self) -> None:
        """Ends a pause."""
        self._paused = False

    def flush_cache(self) -> None:
        """Empties the prefix cache."""
        with self.recoverable():
            self._scheduler.flush()

    def update_weights(self, weights: Any, version: str | None = None) -> None:
        """Replaces the weights. Running requests continue with the new ones: their keys and values are computed again.

        A token that is being computed with the old weights still counts, and is returned with their version.

        Args:
            weights: What `Model.with_weights` takes.
            version: Their name in outputs; "1", "2", ... by default.

        Raises:
            TypeError: If the model does not accept weights in that format.
            ValueError: If they belong to another model. The old weights stay.
        """
        self.take_model(self._model.with_weights(weights), version)

    def take_model(self, model: Model, version: str | None = None) -> None:
        """Replaces the model by what its `with_weights` returned; see `update_weights`."""
        with self.recoverable():
            self._model = model
            self._programs.replace_model(model)
            for sequence in list(self._scheduler.running):
                self._scheduler.preempt(sequence)
            self._scheduler.flush()
            self._counts["updates"] += 1
            self.weight_version = str(self._counts["updates"]) if version is None else version

    def warm_up(self, on_progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Compiles all programs, so that none is compiled while requests run, and prepares the vocabulary for grammars.

        Args:
            on_progress: Called with the number of finished shapes and their total.
        """
        with self.recoverable():
            self._programs.warm_up(on_progress)
            self._grammars.prepare()

    def stats(self) -> EngineStats:
        """Returns the current statistics."""
        scheduler = self._scheduler
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            kv_cache_usage=scheduler.usage,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            preemptions=scheduler.preemptions,
            compilations=self._programs.compiled,
            prompt_tokens=self._counts["prompt_tokens"],
            generated_tokens=self._counts["generated_tokens"],
            drafted_tokens=self._counts["drafted_tokens"],
            accepted_tokens=self._counts["accepted_tokens"],
            finished=dict(self._finished),
            weight_version=self.weight_version,
            cache_tokens=self.num_pages * self.options.page_size,
            state_bytes=self._state_bytes.running,
            snapshot_bytes=self._state_bytes.snapshot,
            num_snapshots=0 if self._states is None else self._states.pool.num_pages,
            snapshots_used=0 if self._states is None else self._states.pool.num_pages - self._states.pool.free,
        )

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Serves prompts and returns their outputs, in their order.

        Requests added before are served too, and their outputs are not returned.

        Args:
            prompts: Tokens of each prompt.
            params: For all, or for each.

        Raises:
            TypeError: As `add`.
            ValueError: As `add`, or if the numbers of params and prompts differ, or the engine is paused.
        """
        each = params_of(prompts, params)
        if self._paused:
            raise ValueError("Engine: it is paused; call resume first.")
        return serve_all(self, prompts, each)

    @contextmanager
    def recoverable(self) -> Iterator[None]:
        """Marks a section that must not be left halfway: if it raises, the next call recovers."""
        self._recover()
        self._interrupted = True
        yield
        self._interrupted = False

    def _recover(self) -> None:
        """Computes all requests again from the start if the last call was interrupted."""
        if not self._interrupted:
            return
        self._in_flight = None
        self._programs.replace_model(self._model)
        self._programs.start_over()
        self._scheduler.start_over()
        for request in self._requests.values():
            request.start_over()
            for sequence in request.sequences:
                if sequence.finish_reason is None:
                    self._scheduler.add(sequence)
        self._interrupted = False

    def _take(self, step: Step, watched: Container[str] | None) -> list[RequestOutput]:
        """Reads a step, and passes its results to the sequences."""
        changed: dict[str, Request] = {}
        generated = 0
        results = step.read()
        for work in results.works:
            sequence, request = work.sequence, work.sequence.request
            if sequence.finish_reason is not None:  # it ended, or was aborted, after this step was dispatched
                continue
            if results.scored and work in results.scored:
                request.prompt_logprobs += results.scored[work]
            taken = accept(work, results)
            generated += taken
            if work.samples and work.drafts:
                self._counts["drafted_tokens"] += work.drafts
                self._counts["accepted_tokens"] += max(0, taken - 1)
            # Everything after a rejected draft is discarded.
            self._scheduler.read(work, accepted=taken - 1 if taken else 0)
            if sequence.finish_reason is not None:
                self._scheduler.remove(sequence)
            if work.reaches_end:
                request.weight_version = step.weight_version
                if sequence.finish_reason is not None or watched is None or request.id in watched:
                    changed[request.id] = request
        self._counts["generated_tokens"] += generated
        outputs = []
        for request in changed.values():
            if request.finished:
                outputs.append(self._finish(request))
            elif watched is None or request.id in watched:
                outputs.append(request.output())
        return outputs

    def _finish(self, request: Request) -> RequestOutput:
        del self._requests[request.id]
        if not self._requests:
            self._in_flight = None  # no request waits for its results
        for sequence in request.sequences:
            if sequence.finish_reason is not None:
                self._finished[sequence.finish_reason] += 1
        return request.output()
