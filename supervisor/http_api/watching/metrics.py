"""GET /metrics: what Prometheus collects.

States are read when somebody asks; what happened is counted by listeners of each supervisor, so that requests of
the application around this one count, too. Each application has a registry of its own. Names follow Prometheus'
naming practices: base units, `_total` for counters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from infervisor import Event, Report, Status
from infervisor.supervisor.events import (
    BreakerOpened,
    RequestReleased,
    RequestResumed,
    WorkerBecameReady,
    WorkerExited,
    WorkerHung,
)
from infervisor.supervisor.http_api.context import Context

LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Buckets from a millisecond to ten minutes."""
TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1)
"""Buckets of the time between two tokens."""


def routes(context: Context) -> list[BaseRoute]:
    """Return the route. Its counters listen as long as it lives."""
    counts = _Counts(CollectorRegistry(auto_describe=False))
    counts.registry.register(_States(context))
    for name, supervisor in context.models.items():
        _listen(counts, supervisor.add_listener, name)

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(counts.registry), headers={"Content-Type": content_type})

    return [Route("/metrics", metrics)]


def _listen(
    counts: _Counts, add_listener: Callable[[Callable[[Event], None]], Callable[[], None]], model: str
) -> None:
    # A supervisor may outlive the application, whose route holds the counters.
    known = weakref.ref(counts)

    def on_event(event: Event) -> None:
        there = known()
        if there is None:
            remove()
        else:
            there.take(model, event)

    remove = add_listener(on_event)


class _Counts:
    """What happened, by model."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"infervisor_{name}", text, ("model", *labels), registry=registry)

        def histogram(
            name: str, text: str, *labels: str, buckets: tuple[float, ...] = LATENCY_S
        ) -> Histogram:
            return Histogram(
                f"infervisor_{name}_seconds", text, ("model", *labels), registry=registry, buckets=buckets
            )

        self._requests = counter("requests", "Requests that ended and are released.", "end_reason")
        self._tokens = counter("tokens", "Tokens of released requests.", "kind")
        self._resumes = counter("resumes", "Times that a request went on after its worker was lost.")
        self._paused = counter("paused_seconds", "Time without credit: readers were behind.")
        self._exits = counter("worker_exits", "Workers that are gone.", "cause")
        self._hangs = counter("worker_hangs", "Workers that owed a step and stood still.")
        self._opened = counter("breaker_opened", "Times that a place for a worker gave up.")
        self._queue = histogram("request_queue", "From queued to submitted.")
        self._ttft = histogram("time_to_first_token", "From queued to the first token.")
        self._tpot = histogram("time_per_output_token", "Per token after the first.", buckets=TOKEN_S)
        self._total = histogram("request_duration", "From queued to ended.", "end_reason")
        self._release = histogram(
            "request_release", "From the cancel, or else the end, until the worker is free.", "stage"
        )
        self._startup = histogram("worker_startup", "From a worker's spawn until it is ready.")

    def take(self, model: str, event: Event) -> None:
        """Count an event."""
        match event:
            case RequestReleased():
                self._request(model, event.report)
            case RequestResumed():
                self._resumes.labels(model).inc()
            case WorkerExited():
                self._exits.labels(model, str(event.cause)).inc()
            case WorkerHung():
                self._hangs.labels(model).inc()
            case BreakerOpened():
                self._opened.labels(model).inc()
            case WorkerBecameReady():
                self._startup.labels(model).observe(event.startup_s)
            case _:
                pass

    def _request(self, model: str, report: Report) -> None:
        timeline, usage, reason = report.timeline, report.usage, str(report.end_reason)
        self._requests.labels(model, reason).inc()
        self._tokens.labels(model, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(model, "prompt_cached").inc(usage.cached_tokens)
        self._tokens.labels(model, "completion").inc(max(usage.completion_tokens, timeline.tokens))
        self._paused.labels(model).inc(timeline.paused_ns / 1e9)
        for histogram, seconds in (
            (self._queue.labels(model), timeline.queue_s),
            (self._ttft.labels(model), timeline.ttft_s),
            (self._tpot.labels(model), timeline.tpot_s),
            (self._total.labels(model, reason), timeline.total_s),
            (self._release.labels(model, str(report.stage or "none")), timeline.release_s),
        ):
            if seconds is not None:
                histogram.observe(seconds)


class _States(Collector):
    """What is, as of now."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        """Yield the state of every model, and of the service."""
        live = GaugeMetricFamily("infervisor_http_requests", "HTTP requests that ask a model, in progress.")
        live.add_metric((), len(self._context.ledger.live()))
        yield live
        states = [(name, supervisor.status()) for name, supervisor in self._context.models.items()]
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"infervisor_{name}", text, labels=("model",))
            for model, status in states:
                gauge.add_metric((model,), value(status))
            yield gauge
        yield from _of_workers(states)


_GAUGES: tuple[tuple[str, str, Callable[[Status], float]], ...] = (
    ("ready", "1 while a worker serves.", lambda status: any(w.role == "serving" for w in status.workers)),
    ("breaker_open", "1 while requests are refused.", lambda status: status.slot == "open"),
    ("queue_depth", "Requests that wait.", lambda status: status.queue_depth),
    ("queue_peak", "Most requests that waited at once.", lambda status: status.queue_peak),
    ("requests_in_flight", "Requests in workers.", lambda status: status.in_flight),
    ("places", "Requests that run at once when all workers serve.", lambda status: status.places),
    ("snapshot_bytes", "Shared memory that snapshots take.", lambda status: status.snapshot_bytes),
    ("worker_peak_rss_bytes", "Most resident memory of one worker.", lambda status: status.peak_rss_bytes),
)


def _of_workers(states: list[tuple[str, Status]]) -> Iterator[Metric]:
    restarts = CounterMetricFamily("infervisor_restarts", "Workers started again.", labels=("model", "cause"))
    count = GaugeMetricFamily("infervisor_workers", "Workers.", labels=("model", "role", "phase"))
    labels = ("model", "pid")
    rss = GaugeMetricFamily("infervisor_worker_resident_bytes", "Resident memory of a worker.", labels=labels)
    pss = GaugeMetricFamily(
        "infervisor_worker_proportional_bytes", "Memory of a worker, shared pages divided.", labels=labels
    )
    cpu = CounterMetricFamily("infervisor_worker_cpu_seconds", "CPU time of a worker.", labels=labels)
    for model, status in states:
        for cause, number in status.restarts.items():
            restarts.add_metric((model, str(cause)), number)
        kinds: dict[tuple[str, str], int] = {}
        for worker in status.workers:
            kind = (worker.role, worker.phase)
            kinds[kind] = kinds.get(kind, 0) + 1
            if worker.sample is not None:
                who = (model, str(worker.pid))
                rss.add_metric(who, worker.sample.rss_bytes)
                cpu.add_metric(who, worker.sample.cpu_s)
                if worker.sample.pss_bytes is not None:
                    pss.add_metric(who, worker.sample.pss_bytes)
        for (role, phase), number in kinds.items():
            count.add_metric((model, role, phase), number)
    yield from (restarts, count, rss, pss, cpu)
