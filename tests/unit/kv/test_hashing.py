"""Prefix names: golden vectors, an independent re-statement of the chain, and inputs that must never meet."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmesh.errors import InvalidArgument
from kvmesh.kv.prefix import base_seed, block_hashes, request_seed

GOLDEN_SEEDS = [
    "96d6f56fcf01ae11d981d8c01a486c35",
    "64395e812aff6ec783e7937b3c1abd50",
    "6e81fb7120561833a3ff104110e88ff8",
]
GOLDEN_BLOCKS = [
    "518316fc760dc68647924501b64377aa",
    "06da58ccccd2970244199cd1ab1ac72e",
]
GOLDEN_PLAIN = [
    "017d8e3d683a71e401004642aff38ca9",
    "b5d3900184eaf478313cd0cee9f35cb3",
]
tokens = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def lengths_first(person: bytes, *fields: bytes) -> bytes:
    raw = b"".join(len(field).to_bytes(8, "little") + field for field in fields)
    return hashlib.blake2b(raw, digest_size=16, person=person).digest()


def test_golden_vectors():
    # Gateway, router and workers of different releases meet over these bytes: never edit one to make a test pass.
    base = base_seed("smol", "rev-1", "bf16", {"rope": "none", "kv": "plain"})
    seed = request_seed(base, "lora-a", "tenant-7")
    assert [base.hex(), request_seed(base).hex(), seed.hex()] == GOLDEN_SEEDS
    assert [h.hex() for h in block_hashes(seed, list(range(10)), 4)] == GOLDEN_BLOCKS
    assert [h.hex() for h in block_hashes(request_seed(base), [0, 1, 49151, 2**32 - 1], 2)] == GOLDEN_PLAIN


def test_seeds_are_the_documented_formula():
    base = base_seed("smol", "rev-1", "bf16", {"rope": "none", "kv": "plain"})
    assert base == lengths_first(b"kvmesh-base-1", b"smol", b"rev-1", b"bf16", b"kv", b"plain", b"rope", b"none")
    assert request_seed(base, "lo", "sa") == lengths_first(b"kvmesh-request-1", base, b"lo", b"sa")


@given(tokens, st.integers(1, 9))
def test_chain_is_the_documented_formula(tokens, size):
    parent, expected = bytes(16), []
    for at in range(0, len(tokens) // size * size, size):
        raw = b"".join(token.to_bytes(4, "little") for token in tokens[at : at + size])
        parent = hashlib.blake2b(parent + raw, digest_size=16, person=b"kvmesh-block-1").digest()
        expected.append(parent)
    assert block_hashes(bytes(16), tokens, size) == expected
    assert block_hashes(bytes(16), np.asarray(tokens, dtype=np.int64), size) == expected
    assert block_hashes(bytes(16), tuple(tokens), size) == expected


@given(tokens, tokens, st.integers(1, 5))
def test_equal_hash_means_equal_prefix_and_the_other_way_round(a, b, size):
    for i, (x, y) in enumerate(zip(block_hashes(bytes(16), a, size), block_hashes(bytes(16), b, size), strict=False)):
        assert (x == y) == (a[: (i + 1) * size] == b[: (i + 1) * size])


@given(st.tuples(*[st.text(max_size=3)] * 2), st.tuples(*[st.text(max_size=3)] * 2))
def test_request_fields_do_not_run_into_each_other(a, b):
    assert (request_seed(bytes(16), *a) == request_seed(bytes(16), *b)) == (a == b)


def test_every_field_separates():
    seeds = [
        base_seed("m", "r", "bf16"),
        base_seed("mr", "", "bf16"),
        base_seed("m", "rb", "f16"),
        base_seed("m", "r", "bf16", {"a": "bc"}),
        base_seed("m", "r", "bf16", {"ab": "c"}),
        base_seed("m", "r", "bf16", {"a": "b", "c": ""}),
        request_seed(bytes(16), "a", "bc"),
        request_seed(bytes(16), "ab", "c"),
        request_seed(bytes(16), "abc"),
        request_seed(bytes(16), "", "abc"),
        request_seed(bytes(16)),
    ]
    assert len(set(seeds)) == len(seeds)
    assert base_seed("m", "r", "d", {"x": "1", "y": "2"}) == base_seed("m", "r", "d", {"y": "2", "x": "1"})


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["a"], [[1, 2], [3, 4]], np.array([-1, 4], dtype=np.int32)])
def test_refuses_what_is_no_token(bad):
    with pytest.raises(InvalidArgument):
        block_hashes(bytes(16), bad, 1)


def test_refuses_bad_seeds_and_sizes():
    for bad in (
        lambda: block_hashes(b"short", [1], 1),
        lambda: block_hashes(bytes(16), [1], 0),
        lambda: request_seed(b"short"),
    ):
        with pytest.raises(InvalidArgument):
            bad()
