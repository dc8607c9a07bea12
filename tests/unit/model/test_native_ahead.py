"""Native code that an image's build compiled, where there is no compiler."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kvmesh import native

pytestmark = pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")
FLAGS = ("-O1", "-march=native", "-fPIC")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """As in an image: no compiler, no home. Returns the folder for what is compiled ahead."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KVMESH_CACHE", "/nonexistent")
    monkeypatch.setenv("KVMESH_NATIVE", "1")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("KVMESH_NATIVE_AHEAD", str(tmp_path / "ahead"))
    return tmp_path / "ahead"


def test_what_was_compiled_ahead_serves_without_a_compiler(
    source: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    made = native.compile_ahead(source, FLAGS, tmp_path / "ahead", extra="1.0")
    assert len(made) > 1, "one library per instruction set"
    request.getfixturevalue("no_compiler")
    assert native.load(source, FLAGS, extra="1.0").answer() == 42


def test_another_source_version_or_processor_is_not_served(
    source: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    native.compile_ahead(source, FLAGS, tmp_path / "ahead", extra="1.0")
    request.getfixturevalue("no_compiler")
    with pytest.raises(native.NativeUnavailable, match="no C\\+\\+ compiler"):
        native.load(source, FLAGS, extra="2.0")
    monkeypatch.setattr(native, "_cpu", lambda: "flags\t: fpu sse2")
    with pytest.raises(native.NativeUnavailable, match="no C\\+\\+ compiler"):
        native.load(source, FLAGS, extra="1.0")


def test_a_changed_source_is_another_library(source: Path, no_compiler: Path) -> None:
    before = native._ahead_name(source, FLAGS, "any", "")
    source.write_text('extern "C" int answer() { return 43; }\n')
    assert native._ahead_name(source, FLAGS, "any", "") != before


def test_the_best_library_that_the_processor_runs(
    source: Path, no_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native.platform, "machine", lambda: "x86_64")
    no_compiler.mkdir()
    for level in ("x86-64-v4", "x86-64-v3"):
        (no_compiler / native._ahead_name(source, FLAGS, level, "")).touch()
    v3 = "flags\t: avx2 bmi1 bmi2 f16c fma movbe"
    for flags, level in ((v3, "x86-64-v3"), (f"{v3} avx512f avx512bw avx512cd avx512dq avx512vl", "x86-64-v4")):
        monkeypatch.setattr(native, "_cpu", lambda flags=flags: flags)
        found = native._ahead(source, FLAGS, "")
        assert found is not None
        assert level in found.name
    monkeypatch.setattr(native, "_cpu", lambda: "flags\t: avx2")
    assert native._ahead(source, FLAGS, "") is None
    # Without -march=native one library serves every machine.
    assert native._levels(("-O2",)) == (("any", frozenset()),)
