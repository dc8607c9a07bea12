"""Grafana dashboards, written from what they ask: `python -m tools.dashboards` makes deploy/grafana/dashboards/*.json.

`promql` builds queries from the metrics of `kvmesh.telemetry.names`, so a metric or label that is not there cannot be
asked for; `grafana` lays panels out; the boards themselves are the other files.
"""
