"""Metrics of the server, through the OpenTelemetry API; no-ops unless an endpoint is configured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from penstock.server.core.errors import MAX_ID_LENGTH

Gauge = Callable[[], float]

MOST_REASONS = 200
"""Each reason is kept forever and is a separate series in the metrics, so their number is limited."""
OTHER = "OTHER"


class ReasonCounts(Counter[str]):
    """Counts by reason, for reasons that callers choose."""

    def count(self, reason: str, times: int = 1) -> None:
        """Counts as OTHER if the reason is one too many or too long."""
        known = reason in self or len(self) < MOST_REASONS
        self[reason if known and len(reason) <= MAX_ID_LENGTH else OTHER] += times


class ServerMetrics:
    def __init__(self) -> None:
        self._meter = metrics.get_meter("penstock.server")
        self._tokens = self._meter.create_counter(
            "penstock.tokens", "{token}", "Tokens the policy sampled"
        )
        self._lag = self._meter.create_histogram(
            "penstock.group.lag",
            "{version}",
            "Lag of the oldest token of a group when it was taken",
        )
        self._pause = self._meter.create_histogram(
            "penstock.weights.pause", "s", "How long a switch stopped generation"
        )
        self._update_bytes = self._meter.create_histogram(
            "penstock.weights.bytes", "By", "Bytes of an upload"
        )
        self._changed_tensors = self._meter.create_histogram(
            "penstock.weights.changed_tensors",
            "{tensor}",
            "Tensors of an upload that differ from the previous version",
        )
        self._unchanged = self._meter.create_counter(
            "penstock.weights.unchanged", "{version}", "Uploads that changed no tensor"
        )
        self._stalls = self._meter.create_histogram(
            "penstock.server.stall", "s", "How long the event loop stood still, from 50 ms on"
        )
        self._conversations = self._meter.create_counter(
            "penstock.conversations",
            "{request}",
            "Requests with a whole conversation, by their effect on the conversation held",
        )
        self.conversations: dict[str, int] = {}
        """The same counts since the server's start, by kind."""

    def conversation(self, kind: str) -> None:
        """Count a request by its match with held conversations: new, continued, realigned or branched."""
        self.conversations[kind] = self.conversations.get(kind, 0) + 1
        self._conversations.add(1, {"kind": kind})

    def tokens_sampled(self, count: int, weight_version: int) -> None:
        self._tokens.add(count)

    def group_taken(self, lag: int) -> None:
        self._lag.record(lag)

    def weights_staged(self, length_bytes: int, changed_tensors: int) -> None:
        self._update_bytes.record(length_bytes)
        self._changed_tensors.record(changed_tensors)
        if not changed_tensors:
            self._unchanged.add(1)

    def weights_switched(self, pause_seconds: float) -> None:
        self._pause.record(pause_seconds)

    def stalled(self, seconds: float) -> None:
        self._stalls.record(seconds)

    def observe(self, name: str, unit: str, description: str, read: Gauge) -> None:
        """`read` is called on each export."""

        def callback(_: CallbackOptions) -> Iterable[Observation]:
            return (Observation(read()),)

        self._meter.create_observable_gauge(name, [callback], unit, description)

    def observe_counts(
        self, name: str, unit: str, description: str, read: Callable[[], Mapping[str, float]]
    ) -> None:
        """Running totals, one per reason."""

        def callback(_: CallbackOptions) -> Iterable[Observation]:
            return tuple(Observation(value, {"reason": key}) for key, value in read().items())

        self._meter.create_observable_counter(name, [callback], unit, description)
