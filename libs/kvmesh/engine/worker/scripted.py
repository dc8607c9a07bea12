"""The scripted runner from settings, with programmed faults from a file.

The file is JSON: {"eos_after": tokens, "max_model_len": tokens, "fail_steps": [step, …], "lost_step": step,
"hang_step": step, "hang_s": seconds}; every key may be left out. Steps count from 1. lost_step: there the device is
lost.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from kvmesh.config import WorkerSettings
from kvmesh.engine.failures import DeviceFailed
from kvmesh.engine.runner import StepBatch
from kvmesh.engine.scripted import ScriptedModel, ScriptedRunner
from kvmesh.errors import Internal, InvalidArgument
from kvmesh.rpc.files import read_bounded

MAX_FAULT_BYTES = 64 * 1024
_KEYS = {"eos_after", "max_model_len", "fail_steps", "lost_step", "hang_step", "hang_s"}


class Faults:
    """`before_step` of the runner: raises or waits where the file says so."""

    def __init__(self, program: dict[str, Any]) -> None:
        self._fail = {int(step) for step in program.get("fail_steps", ())}
        self._lost = int(program.get("lost_step", 0))
        self._hang = int(program.get("hang_step", 0))
        self._hang_s = float(program.get("hang_s", 0.0))
        self._never = threading.Event()
        self._step = 0

    def __call__(self, batch: StepBatch) -> None:
        self._step += 1
        if self._step == self._hang:
            self._never.wait(self._hang_s)
        if self._step == self._lost:
            raise DeviceFailed("the device is lost as programmed")
        if self._step in self._fail:
            raise Internal(f"step {self._step} fails as programmed")


def read_faults(path: Path | None) -> dict[str, Any]:
    """The program, checked. Raises InvalidArgument naming what is wrong."""
    if path is None:
        return {}
    try:
        program = json.loads(read_bounded(path, MAX_FAULT_BYTES))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"scripted_faults {path}: {error}", details={"field": "scripted_faults"}) from None
    if not isinstance(program, dict) or (unknown := sorted(set(program) - _KEYS)):
        what = f"unknown key {unknown[0]!r}" if isinstance(program, dict) else "must be an object"
        raise InvalidArgument(f"scripted_faults {path}: {what}", details={"field": "scripted_faults"})
    return program


def scripted_runner(settings: WorkerSettings) -> ScriptedRunner:
    """A runner at the pace that the settings program."""
    program = read_faults(settings.scripted_faults)
    model = ScriptedModel(
        step_s=settings.scripted_step_ms / 1e3,
        prefill_token_s=settings.scripted_token_ms / 1e3,
        layers=settings.scripted_layers,
        verify=settings.scripted_verify,
        dtype="fp32" if settings.dtype == "fp32" else "bf16",
        max_model_len=program.get("max_model_len") or settings.max_model_len or ScriptedModel().max_model_len,
        eos_after=program.get("eos_after"),
    )
    return ScriptedRunner(model, before_step=Faults(program))
