"""Settings of the ranks that share a model, on one host or on several."""

from __future__ import annotations

from pydantic import Field, model_validator

from kvmesh.config.base import ServiceSettings
from kvmesh.config.types import OptionalListen, split_host_port


class RankSettings(ServiceSettings):
    """Tensor parallel: how many processes share each layer, and where they are."""

    tp: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Ranks (processes) that share each layer: tensor parallel. It must divide the model's heads, and "
        "divide its kv heads or be a multiple of them.",
    )
    tp_timeout_s: float = Field(
        default=60.0,
        gt=0,
        le=3600,
        description="Seconds that a rank may come late to the others before the engine gives up and ends.",
    )
    tp_hosts: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Hosts (machines, pods) that have the ranks, the same number each. With several, mesh_token_file "
        "is needed and KV is not moved: role unified, or decode without a sidecar.",
    )
    tp_host_rank: int = Field(
        default=0,
        ge=0,
        le=63,
        description="Which of the hosts this process is on: 0 leads and serves, another only runs its ranks.",
    )
    tp_leader: OptionalListen = Field(
        default="", description='"host:port" where the other hosts find host 0, when tp_hosts is above 1.'
    )
    tp_listen: OptionalListen = Field(
        default="", description='"host:port" where host 0 listens for the others; "" = tp_leader.'
    )
    tp_address: str = Field(
        default="",
        max_length=64,
        pattern=r"^[0-9A-Fa-f.:]*$",
        description='IP address of this host for collectives; "" = the one on the way between it and host 0.',
    )
    tp_join_s: float = Field(
        default=600.0,
        gt=0,
        le=86_400,
        description="Seconds that the hosts wait for one another at start before they give up and end.",
    )

    @property
    def ranks_per_host(self) -> int:
        """Ranks on each host."""
        return self.tp // self.tp_hosts

    @model_validator(mode="after")
    def _hosts_consistent(self) -> RankSettings:
        if self.tp % self.tp_hosts:
            raise ValueError("tp must be a multiple of tp_hosts")
        if self.tp_host_rank >= self.tp_hosts:
            raise ValueError("tp_host_rank must be below tp_hosts")
        if self.tp_hosts == 1:
            return self
        if not self.tp_leader and (self.tp_host_rank or not self.tp_listen):
            raise ValueError("tp_hosts above 1 needs tp_leader")
        if self.tp_host_rank and split_host_port(self.tp_leader)[1] == 0:
            raise ValueError("tp_leader needs a port above 0")
        if self.mesh_token_file is None:
            raise ValueError("tp_hosts above 1 needs mesh_token_file: the hosts prove to one another that they know it")
        return self
