"""One settings class a service. Units are in the names: `_s` seconds, `_ms` milliseconds, `_bytes` bytes."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from kvmesh.config.base import MIB, ServiceSettings
from kvmesh.config.parallel import RankSettings
from kvmesh.config.types import NameList, PlainUrl, SemanticRule, TargetList

# KV memory of an engine on CPU.
CPU_KV_BYTES = 256 * MIB
# Tokens of a step: 4,096 keep a GPU's matrix units busy, and a prompt more would only make the first one wait for it;
# where decode rows wait for the step too, less.
GPU_TOKENS, GPU_PREFILL_TOKENS = 2048, 4096
# Sequences of one.
GPU_BATCH = 256


class RouterSettings(ServiceSettings):
    """Decides between a cached answer, a running twin and a pair of workers."""

    model_config = SettingsConfigDict(env_prefix="KVMESH_ROUTER_")
    service: ClassVar[str] = "router"

    redis_url: PlainUrl = Field(
        default="",
        description='Redis or Valkey URL without a password: "redis://host:6379/0", or "rediss://"; "" = no exact'
        " answers and no twins.",
    )
    redis_cluster: bool = Field(default=False, description="redis_url names a node of a Redis Cluster.")
    redis_ca_file: Path | None = Field(
        default=None, description="PEM bundle that signs Redis's TLS certificate; default the system's."
    )
    redis_password_file: Path | None = Field(default=None, description="File that holds the Redis password.")
    redis_timeout_ms: int = Field(
        default=20, ge=1, le=10_000, description="Milliseconds Redis gets before a request goes on without it."
    )
    cache: Literal["off", "exact", "semantic"] = Field(
        default="semantic", description="Strongest cache mode offered; a tenant's policy may only lower it."
    )
    cache_secret_file: Path | None = Field(
        default=None,
        description="File of the secret that hides tenants' names in Redis, the same for all routers; default from the"
        " mesh token.",
    )
    cache_tenant_entries: int = Field(
        default=100_000, ge=1, le=100_000_000, description="Cached answers of one tenant; above it the oldest go."
    )
    cache_tenant_bytes: int = Field(
        default=256 * MIB,
        ge=1024,
        le=1 << 40,
        description="Bytes of one tenant's cached answers; above it the oldest go.",
    )
    cache_ttl_s: float = Field(default=3600.0, gt=0, le=31_536_000, description="Seconds a cached answer lives.")
    cache_max_entry_bytes: int = Field(
        default=256 * 1024, ge=1024, le=64 * MIB, description="Largest cached answer, in bytes."
    )
    embedder: Literal["minilm", "none", "hash"] = Field(
        default="minilm", description='Embedding model of the semantic cache; "hash" is for tests, "none" turns it off.'
    )
    embed_timeout_ms: int = Field(
        default=30, ge=1, le=10_000, description="Milliseconds an embedding gets before a request goes on without it."
    )
    semantic_threshold: float = Field(
        default=0.7, ge=0.0, le=1.0, description="Least cosine similarity (tau) of a semantic hit."
    )
    semantic_rules: NameList = Field(
        [],
        max_length=4096,
        description='Thresholds by tenant and model, first match counts: "acme/auto=0.97", "*/code=0.99", or with'
        ' ":no-guards" at the end; a tenant\'s own threshold can only raise them.',
    )
    semantic_max_entries: int = Field(
        default=100_000, ge=1, le=100_000_000, description="Vectors kept over all partitions."
    )
    semantic_max_bytes: int = Field(
        default=384 * MIB,
        ge=MIB,
        le=1 << 40,
        description="Bytes of vectors, questions and answers in memory; with Redis, answers leave first.",
    )
    semantic_index: Literal["cpu", "gpu"] = Field(
        default="cpu", description='Where large partitions are searched; "gpu" needs faiss-gpu and a GPU.'
    )
    worker_timeout_s: float = Field(
        default=3.0, gt=0, le=600, description="Seconds without a report after which a worker gets no more requests."
    )
    fleet_wait_s: float = Field(
        default=0.0,
        ge=0,
        le=600,
        description="Seconds at most that readiness waits after the start until workers have attached: a router that is"
        " replaced then goes only when its successor knows them. 0 = it does not wait.",
    )
    credit_ttl_s: float = Field(
        default=2.0, gt=0, le=60, description="Seconds a placement counts before a report shows it."
    )
    alternates: int = Field(default=3, ge=0, le=64, description="Ranked alternates returned with a placement.")
    beta_prefill: float = Field(
        default=2.0,
        ge=0.0,
        le=100.0,
        description="Weight of a prefill worker's relative load against the share of the prompt that it holds.",
    )
    beta_decode: float = Field(default=2.0, ge=0.0, le=100.0, description="The same for decode workers.")
    session_bonus: float = Field(
        default=0.03, ge=0.0, le=1.0, description="Score bonus of the worker that served a session last."
    )
    local_prefill_tokens: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Prompt tokens that decode may lack and be named no prefill worker; 0 = one page.",
    )
    events_stale_s: float = Field(
        default=3.0,
        gt=0,
        le=600,
        description="Seconds without KV events after which a loaded worker's prefixes are in doubt.",
    )
    breaker_failures: int = Field(
        default=5, ge=1, le=32, description="Failed requests on a worker after which its breaker opens."
    )
    breaker_window_s: float = Field(default=10.0, gt=0, le=3600, description="Seconds within which they fell.")
    breaker_backoff_s: float = Field(
        default=1.0, gt=0, le=600, description="Seconds a breaker stays open at first; doubled up to 30."
    )
    aliases: NameList = Field(
        ["auto"],
        max_length=256,
        description='Names that stand for a model: "name=model", or "name" alone for what most workers serve.',
    )
    shadow_rate: float = Field(
        default=0.005,
        ge=0,
        le=0.01,
        description="Share of semantic hits that are asked again in the background, to estimate false hits.",
    )
    shadow_per_minute: float = Field(
        default=6.0, ge=0, le=6000, description="Most such requests a minute and router, on average."
    )
    explain_texts: bool = Field(
        default=False, description="Show remembered questions in `kvmesh router explain`: they are users' own words."
    )
    classes: NameList = Field(
        [],
        max_length=64,
        description='Aliases with two pools, chosen by complexity: "alias=small model|large model"; none by default.',
    )
    class_quality: float = Field(
        default=0.97, gt=0, le=1, description="Part of the large pool's quality that classes must keep."
    )
    class_threshold: float | None = Field(
        default=None, ge=0, le=1, description="Least probability for the small pool, in place of class_quality."
    )
    class_weights: Path | None = Field(
        default=None, description="Classifier weights trained on your own labels; none = the package's."
    )
    class_unproven: bool = Field(
        default=False, description="Use weights that did not meet the rule on held-out subjects all the same."
    )
    class_session_ttl_s: float = Field(
        default=3600.0, gt=0, le=604_800, description="Seconds without a request after which a session's class ends."
    )
    class_feedback_file: Path | None = Field(
        default=None, description="JSONL file of verdicts on classes (at most 2 x 64 MiB); none = only counted."
    )
    class_feedback_texts: bool = Field(default=False, description="Write prompts into that file too.")

    @model_validator(mode="after")
    def _named(self) -> RouterSettings:
        if any(not alias.partition("=")[0].strip() for alias in self.aliases):
            raise ValueError('an alias is "name" or "name=model"')
        self.semantic_rule_table  # noqa: B018 - raises for a rule that is none
        self.class_pools  # noqa: B018 - raises for pools that are none
        return self

    @property
    def semantic_rule_table(self) -> tuple[SemanticRule, ...]:
        """`semantic_rules`, parsed."""
        return tuple(SemanticRule.parse(rule) for rule in self.semantic_rules)

    @property
    def class_pools(self) -> dict[str, tuple[str, str]]:
        """Alias → small and large model; ValueError for an entry that is not "alias=small|large"."""
        pools: dict[str, tuple[str, str]] = {}
        for entry in self.classes:
            alias, _, models = (part.strip() for part in entry.partition("="))
            small, _, large = (part.strip() for part in models.partition("|"))
            if not (alias and small and large) or "|" in large or small == large or alias in (small, large):
                raise ValueError('a class is "alias=small model|large model", of three different names')
            if alias in pools:
                raise ValueError(f"the alias {alias!r} has classes twice")
            pools[alias] = (small, large)
        return pools

    @property
    def alias_map(self) -> dict[str, str]:
        """Alias → model; "" stands for what most workers serve."""
        pairs = (alias.partition("=") for alias in self.aliases)
        return {name.strip(): model.strip() for name, _, model in pairs}


class WorkerSettings(RankSettings):
    """An engine: prefill, decode or both."""

    model_config = SettingsConfigDict(env_prefix="KVMESH_WORKER_")
    service: ClassVar[str] = "worker"

    role: Literal["prefill", "decode", "unified"] = Field(default="unified", description="What this engine serves.")
    model: str = Field(
        default="smollm2",
        min_length=1,
        max_length=512,
        description="Model: a known name, a GGUF file or a Hugging Face directory.",
    )
    served_name: str = Field(
        default="", max_length=256, description='Name clients use for the model; "" = from the model.'
    )
    runner: Literal["torch", "scripted"] = Field(
        default="torch", description="Real model, or the scripted one for tests."
    )
    dtype: Literal["bf16", "fp32", "fp16"] = Field(
        default="bf16", description="Type of weights and activations, and of KV pages unless kv_dtype says another."
    )
    kv_dtype: Literal["auto", "bf16", "fp8_e4m3"] = Field(
        default="auto",
        description="Type of KV pages: auto = dtype; fp8_e4m3, on a GPU: half of bf16's bytes, in memory and between "
        "engines, all of which must have it.",
    )
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description='"cpu", "cuda" or "cuda:N".')
    threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Compute threads on CPU, divided among the ranks; 0 = as many as this process has CPUs.",
    )
    seed: int = Field(default=0, ge=0, le=(1 << 63) - 1, description="Base seed of the prefix cache hash chain.")
    page_size: int = Field(default=0, ge=0, le=1024, description="Tokens of a KV page; 0 = 16, on a GPU 64.")
    num_pages: int = Field(
        default=0, ge=0, le=100_000_000, description="KV pages; 0 = as many as kv_memory_bytes holds."
    )
    kv_memory_bytes: int = Field(
        default=0,
        ge=0,
        description="Bytes of KV memory, of all ranks together, when num_pages is 0; 0 = 256 MiB, on a GPU what "
        "gpu_memory_utilization leaves.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9,
        gt=0,
        le=1,
        description="GPU: part of its memory that weights, workspaces, graphs and KV pages may take together.",
    )
    max_model_len: int = Field(
        default=0, ge=0, le=10_000_000, description="Longest sequence in tokens; 0 = the model's."
    )
    max_batch: int = Field(default=32, ge=1, le=4096, description="Sequences of one step (on a GPU 256 by default).")
    token_budget: int = Field(
        default=512,
        ge=1,
        le=1_000_000,
        description="Tokens of one step, prefill and decode together (on a GPU 2048 by default, 4096 of role prefill).",
    )
    chunk_size: int = Field(
        default=256,
        ge=1,
        le=1_000_000,
        description="Prompt tokens of one sequence in one step (on a GPU 2048 by default, 4096 of role prefill).",
    )
    cuda_graphs: bool = Field(default=True, description="GPU: replay decode steps as captured graphs.")
    cuda_graph_max_batch: int = Field(
        default=0, ge=0, le=4096, description="GPU: largest batch that has a graph; 0 = max_batch."
    )
    overlap: bool = Field(
        default=True, description="Queue a step while the one before it runs, where the runner can (a GPU)."
    )
    max_queue: int = Field(default=32, ge=0, le=100_000, description="Accepted sequences that wait for a batch place.")
    look_ahead: int = Field(default=1, ge=0, le=1024, description="Pages reserved beyond the prompt at admission.")
    local_prefill_threshold: int = Field(
        default=-1,
        ge=-1,
        le=1_000_000,
        description="Uncached prompt tokens up to which decode prefills; -1 = one page.",
    )
    prefix_cache: bool = Field(default=True, description="Reuse the pages of equal prefixes.")
    stall_timeout_s: float = Field(
        default=10.0, gt=0, le=3600, description="Seconds without progress, with work to do, that turn readiness off."
    )
    routers: TargetList = Field(default=[], description="Router addresses that this worker reports to.")
    report_interval_s: float = Field(default=0.2, gt=0, le=60, description="Seconds between load reports.")
    heartbeat_s: float = Field(default=1.0, gt=0, le=60, description="Seconds between heartbeat frames.")
    write_timeout_s: float = Field(
        default=5.0,
        gt=0,
        le=600,
        description="Seconds a frame may stay unread before the gateway's sequences are aborted.",
    )
    prefill_workers: TargetList = Field(default=[], description="Prefill workers used when a request names none.")
    prefill_timeout_s: float = Field(
        default=60.0, gt=0, le=3600, description="Seconds prefill and transfer of a request get."
    )
    prefill_silence_s: float = Field(
        default=10.0,
        ge=2,
        le=3600,
        description="Seconds without a sign of life (it is pinged) after which a prefill worker is given up.",
    )
    sidecar_socket: Path | None = Field(
        default=None,
        description="Unix socket of the local kvtransfer sidecar, or a folder of several: a free one is taken.",
    )
    scripted_step_ms: float = Field(
        default=10.0, ge=0, le=60_000, description="Scripted runner: milliseconds of a step."
    )
    scripted_token_ms: float = Field(
        default=0.0, ge=0, le=1000, description="Scripted runner: milliseconds a prompt token."
    )
    scripted_layers: int = Field(default=4, ge=1, le=256, description="Scripted runner: layers of the pretended model.")
    scripted_verify: Literal["all", "last", "off"] = Field(
        default="all",
        description="Scripted runner: what of a history is checked in KV; off = nothing is written either.",
    )
    scripted_faults: Path | None = Field(default=None, description="Scripted runner: file of programmed faults.")
    nvlink: Literal["auto", "off", "cuda", "host"] = Field(
        default="auto",
        description="Whether this process writes KV into its peers by itself (transport nvlink): cuda, from a GPU; "
        "auto, from a GPU whose sidecar has that transport; host, for tests.",
    )
    gpudirect: Literal["auto", "off"] = Field(
        default="off",
        description="Whether NICs read and write this GPU's memory by themselves (verbs, efa): auto, where nvlink is "
        "not used and sidecar, NIC and driver can.",
    )
    staging: Literal["auto", "off", "on"] = Field(
        default="auto",
        description="Whether KV travels through pages in host memory, for transports that do not reach a GPU's: auto, "
        "from a GPU without nvlink; on, always (on CPU: for tests).",
    )
    staging_pages: int = Field(
        default=0,
        ge=0,
        le=100_000_000,
        description="Pages of that host memory; 0 = those of the 4 longest prompts, at most 8 GiB.",
    )

    @property
    def local_prefill_tokens(self) -> int:
        """Uncached prompt tokens up to which decode prefills on its own."""
        return self.page_size if self.local_prefill_threshold < 0 else self.local_prefill_threshold

    @property
    def on_gpu(self) -> bool:
        """Whether the engine runs on a GPU."""
        return self.device.startswith("cuda")

    @property
    def gpu(self) -> int:
        """The GPU's ordinal, as this process sees it."""
        return int(self.device.partition(":")[2] or 0)

    @model_validator(mode="after")
    def _consistent(self) -> WorkerSettings:
        for name, value in self._unset().items():
            # The instance is frozen, but for this: nobody has seen it yet.
            object.__setattr__(self, name, value)
        if self.chunk_size > self.token_budget:
            raise ValueError("chunk_size must not exceed token_budget")
        if self.max_batch > self.token_budget:
            raise ValueError("max_batch must not exceed token_budget")
        if 0 < self.kv_memory_bytes < 4096:
            raise ValueError("kv_memory_bytes must be 0 or at least 4096")
        if self.runner == "scripted" and self.tp > 1:
            raise ValueError("the scripted runner has one rank: set tp to 1")
        if self.tp_hosts > 1 and (self.sidecar_socket is not None or self.role == "prefill"):
            # Its source would have to write to several sidecars, and theirs to count together: not built.
            raise ValueError(
                "not implemented: moving KV of ranks on several hosts. With tp_hosts, leave sidecar_socket out and set "
                "role to unified, or to decode, which then computes prompts itself"
            )
        return self

    def _unset(self) -> dict[str, int]:
        """What depends on the device, of that which nobody has set."""
        values: dict[str, int] = {}
        if not self.page_size:
            values["page_size"] = 64 if self.on_gpu else 16
        if not self.on_gpu:
            if not self.kv_memory_bytes:
                values["kv_memory_bytes"] = CPU_KV_BYTES
            return values
        given = self.model_fields_set
        tokens = GPU_PREFILL_TOKENS if self.role == "prefill" else GPU_TOKENS
        # What nobody has set makes room for what somebody has.
        asked = [getattr(self, name) for name in ("chunk_size", "max_batch") if name in given]
        budget = self.token_budget if "token_budget" in given else max([tokens, *asked])
        values["token_budget"] = budget
        if "chunk_size" not in given:
            values["chunk_size"] = budget
        if "max_batch" not in given:
            values["max_batch"] = min(GPU_BATCH, budget)
        return values


class PrefillSettings(WorkerSettings):
    """An engine that computes prompts and sends their pages away."""

    model_config = SettingsConfigDict(env_prefix="KVMESH_PREFILL_")
    service: ClassVar[str] = "prefill"

    role: Literal["prefill", "decode", "unified"] = Field(default="prefill", description="What this engine serves.")


class DecodeSettings(WorkerSettings):
    """An engine that receives pages and generates tokens."""

    model_config = SettingsConfigDict(env_prefix="KVMESH_DECODE_")
    service: ClassVar[str] = "decode"

    role: Literal["prefill", "decode", "unified"] = Field(default="decode", description="What this engine serves.")


class KvTransferSettings(ServiceSettings):
    """The sidecar that moves KV pages of the engine beside it."""

    model_config = SettingsConfigDict(env_prefix="KVMESH_KVTRANSFER_")
    service: ClassVar[str] = "kvtransfer"

    engine_socket: Path | None = Field(
        default=None,
        description="Unix socket on which the local engine registers; in a folder, one of a name of its own.",
    )
    engine_group: int | None = Field(
        default=None,
        ge=0,
        lt=2**32 - 1,
        description="Group (a number) whose processes may open that socket too, where the engine is another user's.",
    )
    transports: NameList = Field(
        default=["shm", "tcp"],
        min_length=1,
        description="Transports in order of preference: shm, tcp, fake, verbs, efa, nvlink.",
    )
    heartbeat_s: float = Field(default=1.0, gt=0, le=60, description="Seconds between heartbeats of peers.")
    lease_s: float = Field(
        default=5.0, gt=0, le=600, description="Seconds without a heartbeat after which a peer is fenced."
    )
    rank_join_s: float = Field(
        default=30.0,
        gt=0,
        le=3600,
        description="Seconds that the ranks of an engine and its leader wait for one another.",
    )
    tcp_listen_host: str = Field(
        default="127.0.0.1", min_length=1, description="Host on which the tcp transport listens."
    )
    tcp_streams: int = Field(
        default=0, ge=0, le=16, description="Streams of a tcp link, as far as its peer agrees; 0: by cores."
    )
    tcp_checksums: bool = Field(
        default=False, description="Every write of the tcp transport carries a checksum; one end's wish is enough."
    )
    copy_threads: int = Field(
        default=0, ge=0, le=8, description="Threads that copy (shm) and send (tcp) for all links; 0: by cores."
    )
    doorbell: Literal["auto", "sleep", "yield", "spin"] = Field(
        default="auto", description="How the next layer is waited for: see the watcher; auto goes by cores."
    )
    max_slots: int = Field(
        default=1024, ge=1, le=4096, description="Transfers open at a time (12 bits of the immediate)."
    )
    fake_faults: Path | None = Field(default=None, description="File of programmed faults of the fake transport.")
    pin_threads: bool = Field(
        default=True,
        description="Keep moving and polling threads on the NUMA node of the NICs (never on a machine of < 8 CPUs).",
    )
    rdma_devices: NameList = Field(
        default=["auto"],
        min_length=1,
        max_length=64,
        description="RDMA devices of verbs and efa: names, or auto = those nearest to the engine's memory.",
    )
    rdma_near_gpu: str = Field(
        default="",
        max_length=64,
        description="auto: PCI address of the GPU whose memory it is (default: host memory, its node asked).",
    )
    verbs_device: str = Field(
        default="", max_length=64, description="One device of the verbs transport (default: as rdma_devices)."
    )
    verbs_gid_index: int = Field(
        default=-1, ge=-1, le=65535, description="Its GID index; -1 chooses RoCE v2 over IPv4 where there is one."
    )
    verbs_qps: int = Field(default=4, ge=1, le=16, description="Queue pairs per link of the verbs transport.")
    verbs_polling: Literal["auto", "events", "thread"] = Field(
        default="auto", description="How it waits: completion channels, a spinning thread, or by the machine's size."
    )
    efa_device: str = Field(
        default="", max_length=64, description="One device of the efa transport (default: as rdma_devices)."
    )
    efa_polling: Literal["auto", "events", "thread"] = Field(
        default="auto", description="How the efa transport waits; as verbs_polling."
    )

    @model_validator(mode="after")
    def _consistent(self) -> KvTransferSettings:
        unknown = sorted(set(self.transports) - {"shm", "tcp", "fake", "verbs", "efa", "nvlink"})
        if unknown:
            raise ValueError(f"unknown transport {unknown[0]!r}; known: shm, tcp, fake, verbs, efa, nvlink")
        if len(set(self.transports)) != len(self.transports):
            raise ValueError("a transport is named twice")
        if len(set(self.rdma_devices)) != len(self.rdma_devices) or not all(self.rdma_devices):
            raise ValueError("an RDMA device is named twice, or by nothing")
        if "auto" in self.rdma_devices and len(self.rdma_devices) > 1:
            raise ValueError("rdma_devices: auto stands alone")
        if self.lease_s <= self.heartbeat_s:
            raise ValueError("lease_s must be longer than heartbeat_s")
        return self
