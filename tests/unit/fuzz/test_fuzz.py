"""Mutation fuzzing of everything that reads bytes from outside: valid samples, damaged at random.

Whatever the bytes, a reader answers or raises a KvmeshError, in bounded time and memory. The five readers share 30 s
(test_atheris.py has the other half of the minute),
with the same inputs in the same order in every run, as many as the time is enough for. KVMESH_SOAK=1 gives them 600 s
and a seed of its own, which is printed; KVMESH_FUZZ_SEED repeats such a run.
"""

from __future__ import annotations

import json
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from google.protobuf.message import DecodeError

from kvmesh.errors import KvmeshError
from kvmesh.kv.layout import KvGroup, KvLayout
from kvmesh.kv.ring import StepEntry, StepRecord, StepRing
from kvmesh.loading.gguf_model import GgufCheckpoint
from kvmesh.loading.safetensors import SafetensorsFile
from kvmesh.proto.v1 import inference_pb2
from kvmesh.proto.v1 import kvtransfer_pb2 as pb
from kvmesh.transfer.descriptor import check_descriptor, layout_to_proto
from services.gateway import validate

SOAK = bool(os.environ.get("KVMESH_SOAK"))
SECONDS = (600.0 if SOAK else 30.0) / 5
SEED = int(os.environ.get("KVMESH_FUZZ_SEED", "0")) or (random.SystemRandom().randrange(1, 1 << 31) if SOAK else 1)


def mutate(sample: bytes, rng: random.Random) -> bytes:
    """A few damages: flipped bits, overwritten runs, interesting integers, cuts, insertions, copies."""
    data = bytearray(sample)
    for _ in range(rng.randint(1, 6)):
        at = rng.randrange(len(data)) if data else 0
        kind = rng.randrange(6)
        if kind == 0 and data:
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at : at + rng.randint(1, 16)] = rng.randbytes(rng.randint(0, 16))
        elif kind == 2:
            value = rng.choice([0, 1, 0x7F, 0xFF, 0xFFFF, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1])
            data[at : at + 8] = value.to_bytes(8, "little")
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            del data[at : at + rng.randint(1, 64)]
        else:
            source = rng.randrange(len(data) + 1)
            data[at:at] = data[source : source + rng.randint(1, 64)]
    return bytes(data)


def fuzz(samples: list[bytes], read: Callable[[bytes], object], inputs: int) -> None:
    """Damage and read: this many inputs at least, and on until the time is over."""
    rng = random.Random(SEED)
    print(f"seed {SEED}")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    end = time.monotonic() + SECONDS
    count = refused = 0
    while count < inputs or time.monotonic() < end:
        data = mutate(rng.choice(samples), rng)
        begin = time.thread_time()
        try:
            read(data)
        except KvmeshError:
            refused += 1
        except DecodeError:
            refused += 1
        took = time.thread_time() - begin
        assert took < 5.0, f"seed {SEED}: {took:.1f} s for {len(data)} bytes"
        count += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    print(f"{count} damaged inputs, {refused} refused, peak memory grew {grown} MiB")
    assert refused > 0, "nothing was refused: the samples are not read at all"
    assert grown < 512, f"seed {SEED}: peak memory grew by {grown} MiB"


def sample_gguf(path: Path) -> bytes:
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([chr(97 + i) for i in range(26)])
    rng = np.random.default_rng(1)
    shapes = {
        "token_embd.weight": (26, 64),
        "output_norm.weight": (64,),
        "blk.0.attn_q.weight": (64, 64),
        "blk.0.attn_k.weight": (32, 64),
        "blk.0.ffn_up.weight": (64, 64),
    }
    for name, shape in shapes.items():
        data = rng.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, data)
        else:
            kind = gguf.GGMLQuantizationType.Q4_1
            writer.add_tensor(name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_gguf(tmp_path: Path) -> None:
    sample = sample_gguf(tmp_path / "m.gguf")
    target = tmp_path / "damaged.gguf"

    def read(data: bytes) -> None:
        target.write_bytes(data)
        checkpoint = GgufCheckpoint(target, "m")
        try:
            checkpoint.describe()
            for name in list(checkpoint.names())[:4]:
                checkpoint.read(name)
        finally:
            checkpoint.close()

    # Headers are where the numbers are: damage them more often than weights.
    fuzz([sample, sample[:1200]], read, inputs=3_000)


def test_safetensors(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "a": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
            "b": {"dtype": "BF16", "shape": [8], "data_offsets": [64, 80]},
        }
    ).encode()
    sample = len(header).to_bytes(8, "little") + header + bytes(80)
    target = tmp_path / "damaged.safetensors"

    def read(data: bytes) -> None:
        target.write_bytes(data)
        file = SafetensorsFile(target)
        try:
            for name in file.entries:
                file.read(name)
        finally:
            file.close()

    fuzz([sample], read, inputs=3_000)


def test_descriptor() -> None:
    layout = KvLayout(1, "bf16", 16, (KvGroup("kv", "full", (0, 1), 2, 16),), num_pages=64)
    descriptor = pb.Descriptor(
        version=1,
        engine_id="decode-0",
        incarnation=7,
        sidecar_incarnation=8,
        control_address="127.0.0.1:50055",
        layout=layout_to_proto(layout),
        regions=[pb.RegionInfo(group="kv", rank=0, nbytes=layout.region_bytes("kv"), key=9)],
        groups=[pb.GroupPages(group="kv", pages=list(range(20)))],
        num_tokens=20 * 16,
        slot=3,
        generation=5,
        expected_bytes=20 * 2 * layout.page_bytes("kv"),
        request_id="r",
    )
    check_descriptor(descriptor)

    def read(data: bytes) -> None:
        message = pb.Descriptor()
        message.ParseFromString(data)
        check_descriptor(message)

    fuzz([descriptor.SerializeToString()], read, inputs=30_000)


def test_step_ring() -> None:
    size = StepRing.bytes_for(8, 8)
    memory = bytearray(size)
    ring = StepRing(memory)
    for step in range(6):
        entries = tuple(StepEntry(100 + step, 2 * i, 2) for i in range(3))
        assert ring.publish(StepRecord(1 + 4 * step, 4, entries))
    sample = bytes(memory)

    def read(data: bytes) -> None:
        damaged = bytearray(data[:size].ljust(size, b"\0"))
        reader = StepRing(damaged)
        for _ in range(64):
            if reader.consume() is None:
                return
        raise AssertionError("a ring of 8 records gave 64")

    fuzz([sample], read, inputs=30_000)


def test_public_request() -> None:
    """Parsing and field checks of what a client sends."""
    request = inference_pb2.ChatRequest(
        model="m",
        messages=[inference_pb2.ChatMessage(role="user", content="hello there")],
        sampling=inference_pb2.SamplingParams(temperature=0.5, top_p=0.9, n=2, stop=["a", "b"], logit_bias={5: 1.0}),
    )
    bounds = validate.Bounds(vocab_size=512, max_model_len=256, max_prompt_bytes=4096)

    def read(data: bytes) -> None:
        message = inference_pb2.ChatRequest()
        message.ParseFromString(data)
        validate.check_common(message)
        validate.check_messages(message.messages, bounds.max_prompt_bytes)
        sampling = validate.effective_sampling(message.sampling, 8, bounds)
        # What passes is effective and in range: the worker is never asked for nonsense.
        assert 0.0 <= sampling.temperature <= 100.0
        assert 0.0 < sampling.top_p <= 1.0
        assert 1 <= sampling.n <= sampling.best_of <= validate.MAX_CHOICES
        assert 1 <= sampling.max_tokens <= bounds.max_model_len

    fuzz([request.SerializeToString()], read, inputs=30_000)
