"""From settings to a group of ranks on several hosts: what all must have alike, and where they meet."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable

from kvmesh import __version__
from kvmesh.config import WorkerSettings
from kvmesh.engine.parallel.agent import AgentPlan
from kvmesh.engine.parallel.hosts import GroupPlan, Hosts
from kvmesh.loading.source import describe
from kvmesh.rpc.auth import MeshToken

# Of what leader, agents and ranks say to one another.
PROTOCOL = 1


def group_plan(settings: WorkerSettings) -> GroupPlan:
    """Reads parts of the weights, for the model's revision. Raises as `describe`."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    facts = {
        "kvmesh": __version__,
        "protocol": str(PROTOCOL),
        # Collectives of two versions need not fit together.
        "torch": torch,
        "byteorder": sys.byteorder,
        "tp": str(settings.tp),
        "tp_hosts": str(settings.tp_hosts),
        "device": settings.device,
        "model revision": describe(settings.model).revision,
    }
    return GroupPlan(settings.tp_hosts, settings.ranks_per_host, facts, settings.tp_join_s, settings.tp_timeout_s)


def mesh_token(settings: WorkerSettings) -> MeshToken:
    """The secret that hosts prove to one another. Raises OSError, ValueError."""
    assert settings.mesh_token_file is not None
    return MeshToken(settings.mesh_token_file)


def hosts_of(settings: WorkerSettings) -> Callable[[], Hosts] | None:
    """How the leader begins to listen for other hosts; None where there are none."""
    if settings.tp_hosts == 1:
        return None
    return lambda: Hosts(
        group_plan(settings), settings.tp_listen or settings.tp_leader, mesh_token(settings), settings.tp_address
    )


def agent_plan(settings: WorkerSettings, threads: int, logs: dict[str, str]) -> AgentPlan:
    """What a host other than the leader's brings. Raises as `group_plan`."""
    return AgentPlan(
        group_plan(settings),
        settings.tp_host_rank,
        settings.tp_leader,
        threads,
        {"model": settings.model, "logs": logs},
        settings.tp_address,
    )
