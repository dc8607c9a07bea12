"""The metrics of several processes of one service, as one.

Each process keeps its values in files of a shared folder (prometheus_client does that where PROMETHEUS_MULTIPROC_DIR is
set when it is imported), so nothing that was counted is lost with a process, however it ends. Counters and histograms
are sums over all processes that ever ran, and never fall; gauges are put together over those that live, as
`names.Metric.across` says.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.mmap_dict import MmapedDict
from prometheus_client.multiprocess import MultiProcessCollector

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
KEPT = ("counter", "histogram")
RETIRED = "retired"
# Of a process, not of the service: the oldest one's is meant.
_LEAST = "process_start_time_seconds"


class Together:
    """A registry over the processes whose values lie in `folder`; `live` gives their pids."""

    def __init__(self, folder: Path, live: Callable[[], Iterable[int]]) -> None:
        self._folder = folder
        self._live = live
        self._lock = threading.Lock()
        self.registry = CollectorRegistry()
        self.registry.register(_Collector(self._collect))

    def _collect(self) -> list[Metric]:
        with self._lock:
            found = list(MultiProcessCollector(None, str(self._folder)).collect())  # type: ignore[no-untyped-call]
        return [*found, *_processes(self._live())]

    def retire(self, pid: int) -> None:
        """A process has ended: what it counted is kept, in one file for all that have ended; its gauges are gone."""
        with self._lock:
            for path in self._folder.glob(f"*_{pid}.db"):
                kind = path.name.partition("_")[0]
                if kind in KEPT:
                    _add(path, self._folder / f"{kind}_{RETIRED}.db")
                path.unlink(missing_ok=True)


class _Collector:
    def __init__(self, collect: Callable[[], list[Metric]]) -> None:
        self.collect = collect


def _add(source: Path, target: Path) -> None:
    files: Any = MmapedDict
    sums = files(str(target))
    try:
        for key, value, *_ in files.read_all_values_from_file(str(source)):
            if value:
                sums.write_value(key, sums.read_value(key)[0] + value, 0.0)
    finally:
        sums.close()


def _processes(pids: Iterable[int]) -> list[Metric]:
    """Memory, processor time, descriptors and start of all processes together."""
    together: dict[str, Metric] = {}
    for pid in pids:
        for metric in ProcessCollector(pid=functools.partial(int, pid), registry=None).collect():
            mine = together.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
            for sample in metric.samples:
                if not mine.samples:
                    mine.samples.append(sample)
                    continue
                old = mine.samples[0].value
                value = min(old, sample.value) if metric.name == _LEAST else old + sample.value
                mine.samples[0] = sample._replace(value=value)
    return list(together.values())
