"""PromQL for the dashboards. Every selector is narrowed by the dashboard's variables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvmesh.telemetry import names

METRICS = {metric.name: metric for metric in names.all_metrics()}
WINDOW = "$__rate_interval"
# Labels that come from the scrape.
OF_TARGETS = frozenset({"namespace", "job", "instance", "le"})


@dataclass(frozen=True, slots=True)
class Source:
    """The processes that a panel asks about. `job`: a regular expression; both faces of a mesh, gateway and engine,
    measure times under the same names, so it is never left out. `chosen`: only instances that the reader chose."""

    job: str
    chosen: bool = False

    def of(self, name: str, *matchers: str, suffix: str = "", by: Sequence[str] = ()) -> str:
        """Selector of `kvmesh:<name>`. AssertionError for a metric or a label that nobody makes."""
        metric = METRICS[names.PREFIX + name]
        known = {*metric.labels, *OF_TARGETS}
        asked = {re.split(r"[=!]", matcher)[0] for matcher in matchers} | set(by)
        assert asked <= known, f"{metric.name} has no label {asked - known}"
        assert (metric.kind == "histogram") == bool(suffix), metric.name
        regular = re.escape(self.job).replace("\\-", "-") != self.job
        parts = [f'job{"=~" if regular else "="}"{self.job}"', 'namespace=~"$namespace"']
        parts += ['instance=~"$instance"'] * self.chosen
        parts += ['model_name=~"$model"'] * ("model_name" in metric.labels)
        return f"{metric.name}{suffix}{{{','.join([*parts, *matchers])}}}"

    def gauge(self, how: str, name: str, *matchers: str, by: str = "") -> str:
        """A gauge of several processes, put together by `how` (sum, max, min, avg)."""
        return f"{how}{_by(by)} ({self.of(name, *matchers, by=_words(by))})"

    def rate(self, name: str, *matchers: str, by: str = "") -> str:
        """What a counter grows a second."""
        return f"sum{_by(by)} (rate({self.of(name, *matchers, by=_words(by))}[{WINDOW}]))"

    def increase(self, name: str, *matchers: str, by: str = "", window: str = WINDOW) -> str:
        """What a counter grew within the window."""
        return f"sum{_by(by)} (increase({self.of(name, *matchers, by=_words(by))}[{window}]))"

    def quantile(self, q: float, name: str, *matchers: str, by: str = "") -> str:
        """A quantile of a histogram."""
        buckets = self.of(name, *matchers, suffix="_bucket", by=_words(by))
        return f"histogram_quantile({q}, sum{_by(f'{by} le')} (rate({buckets}[{WINDOW}])))"

    def mean(self, name: str, *matchers: str, by: str = "") -> str:
        """The mean of what a histogram saw."""
        total, count = (
            f"sum{_by(by)} (rate({self.of(name, *matchers, suffix=suffix, by=_words(by))}[{WINDOW}]))"
            for suffix in ("_sum", "_count")
        )
        return f"{total} / ({count} > 0)"


def share(part: str, whole: str) -> str:
    """part / whole, 0 where there is nothing: a share of nothing is not NaN here."""
    return f"{part} / clamp_min({whole}, 1e-9)"


def _words(by: str) -> list[str]:
    return by.split()


def _by(by: str) -> str:
    return f" by ({', '.join(_words(by))})" if by.strip() else ""


GATEWAY = Source("kvmesh-gateway")
ROUTER = Source("kvmesh-router")
ENGINE = Source("kvmesh-(prefill|decode)")
DECODE = Source("kvmesh-decode")
PREFILL = Source("kvmesh-prefill")
ALL = Source("kvmesh-.*")


def quantiles(source: Source, name: str, *matchers: str) -> list[tuple[str, str]]:
    """The usual three of a histogram."""
    return [(source.quantile(q, name, *matchers), f"p{q * 100:g}") for q in (0.5, 0.95, 0.99)]
