"""Options are checked before anything is loaded."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama.capacity import default_threads
from infervisor.worker.engines.llama.options import LlamaOptions


def test_every_default_passes_its_own_check() -> None:
    defaults = LlamaOptions()
    given = {f.name: getattr(defaults, f.name) for f in fields(defaults)}
    assert LlamaOptions.from_mapping(given) == defaults


BAD = [
    ("n_ctx", -1), ("n_ctx", 1), ("n_ctx", 31), ("n_ctx", 1 << 31), ("n_ctx", 4096.0), ("n_ctx", "4096"),
    ("n_ctx", True), ("threads", 0), ("threads", -5), ("threads", 513), ("threads", 100_000),
    ("threads", 10**400), ("threads_batch", 0), ("batch_tokens", 0), ("batch_tokens", None), ("ubatch", 1 << 40),
    ("n_gpu_layers", -2), ("main_gpu", -1), ("tensor_split", [-1.0]), ("tensor_split", "1,1"),
    ("tensor_split", [float("nan")]), ("split_mode", "columns"), ("use_mmap", 1), ("use_mlock", "yes"),
    ("flash_attention", "on"), ("flash_attention", 1), ("kv_type_k", "q2_k"), ("kv_type_v", 1),
    ("rope_freq_base", -1.0), ("rope_freq_scale", float("inf")), ("swa_full", None), ("slots", 0), ("slots", 65),
    ("reproducible", 0), ("chat_template", b"x"), ("fit_context", "yes"), ("check_memory", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value!r:.20}" for name, value in BAD])
def test_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(LoadRefused) as refused:
        LlamaOptions.from_mapping({name: value})
    assert refused.value.code == "bad_option"
    assert str(refused.value).startswith(f"{name} must be ")
    assert len(str(refused.value)) < 300


def test_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(LoadRefused, match=r"no option 'ctx_size'.*n_ctx.*chat_template") as refused:
        LlamaOptions.from_mapping({"ctx_size": 5})
    assert refused.value.code == "unknown_option"


@pytest.mark.parametrize(
    ("n_ctx", "trained", "wanted"),
    [
        (None, 256, 256),
        (None, 131_072, 4096),
        (None, 0, 4096),
        (0, 131_072, 131_072),
        (0, 0, 4096),
        (64, 256, 64),
    ],
)
def test_wanted_context(n_ctx: int | None, trained: int, wanted: int) -> None:
    assert LlamaOptions.from_mapping({"n_ctx": n_ctx}).wanted_context(trained) == wanted


def test_reproducible_switches_flash_attention_off() -> None:
    assert LlamaOptions().flash_attention_type == -1
    assert LlamaOptions(flash_attention=True).flash_attention_type == 1
    assert LlamaOptions(flash_attention=True, reproducible=True).flash_attention_type == 0


@pytest.mark.parametrize("off", [{"reproducible": True}, {"flash_attention": False}])
def test_small_value_cache_needs_flash_attention(off: dict[str, Any]) -> None:
    with pytest.raises(LoadRefused, match=f"which {next(iter(off))}="):
        LlamaOptions.from_mapping({"kv_type_v": "q8_0", **off})
    assert LlamaOptions.from_mapping({"kv_type_v": "q8_0"}).kv_type_v == "q8_0"


def test_reproducible_needs_room_for_its_slice() -> None:
    with pytest.raises(LoadRefused, match="reproducible"):
        LlamaOptions.from_mapping({"reproducible": True, "ubatch": 16})


def test_default_threads_stay_within_what_is_allowed() -> None:
    import os

    assert 1 <= default_threads() <= len(os.sched_getaffinity(0))


def test_hyperthreads_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0, 1, 2, 3})
    monkeypatch.setattr("infervisor.worker.engines.llama.capacity._core_of", lambda cpu: str(cpu // 2))
    monkeypatch.setattr("infervisor.worker.engines.llama.capacity._quota_cores", lambda: 512)
    assert default_threads() == 2
    monkeypatch.setattr("infervisor.worker.engines.llama.capacity._quota_cores", lambda: 1)
    assert default_threads() == 1


def test_unknown_topology_counts_every_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("infervisor.worker.engines.llama.capacity.Path", lambda _path: tmp_path / "none")
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {4, 5, 6})
    assert default_threads() == 3
