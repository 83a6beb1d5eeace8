"""Options are checked before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama.capacity import default_threads, usable_cores
from infervisor.worker.engines.llama.options import LlamaOptions, Lora


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
    ("prefix_reuse", "no"), ("lora", 5), ("lora", ""), ("lora", [None]), ("lora", {"path": 3}),
    ("lora", {"scale": 1.0}),
    ("lora", {"path": "a", "scale": "1"}), ("lora", {"path": "a", "scale": float("nan")}),
    ("lora", {"path": "a", "scale": True}), ("lora", {"path": "a", "scale": -1e9}), ("lora", {"path": "a", "x": 1}),
    ("lora", ["a", {"path": "a", "scale": 2.0}]), ("lora", [str(number) for number in range(17)]),
    ("reproducible", 0), ("chat_template", b"x"), ("fit_context", "yes"), ("check_memory", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}={value!r:.20}" for name, value in BAD])
def test_bad_value_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(LoadRefused) as refused:
        LlamaOptions.from_mapping({name: value})
    assert refused.value.code == "bad_option"
    assert str(refused.value).startswith(f"{name} must be ")
    assert len(str(refused.value)) < 300


def test_adapters_in_every_spelling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    for given, lora in (
        (None, ()), ([], ()), ("a.gguf", (Lora("a.gguf", 1.0),)), ("~/a.gguf", (Lora("/home/ann/a.gguf"),)),
        ({"path": "a", "scale": -2}, (Lora("a", -2.0),)),
        (["a", {"path": "~/b", "scale": 0.5}, {"path": "c"}], (Lora("a"), Lora("/home/ann/b", 0.5), Lora("c"))),
    ):  # fmt: skip
        assert LlamaOptions.from_mapping({"lora": given}).lora == lora


def test_slots_are_four_unless_chosen() -> None:
    assert LlamaOptions.from_mapping({"slots": None}).slot_count == 4
    assert LlamaOptions.from_mapping({"slots": 1}).slot_count == 1


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


# --- threads -----------------------------------------------------------------------------------------


def machine(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    cpus: int,
    siblings: int = 1,
    files: dict[str, str] | None = None,
) -> Path:
    """Write a /proc and /sys in which so many processors form cores of `siblings` each; return `root`."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(cpus)))
    for cpu in range(cpus):
        topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        first = cpu // siblings * siblings
        (topology / "thread_siblings_list").write_text(f"{first}-{first + siblings - 1}\n")
    for name, text in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_default_threads_stay_within_what_is_allowed() -> None:
    assert 1 <= default_threads() <= len(os.sched_getaffinity(0))
    assert default_threads(1000) == 1


@pytest.mark.parametrize(
    ("cpus", "siblings", "workers", "threads"),
    [(8, 2, 1, 4), (8, 1, 2, 4), (8, 1, 3, 2), (2, 1, 4, 1), (600, 1, 1, 512)],
)
def test_each_worker_has_its_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpus: int, siblings: int, workers: int, threads: int
) -> None:
    assert default_threads(workers, machine(monkeypatch, tmp_path, cpus, siblings)) == threads


def test_unknown_topology_counts_every_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {4, 5, 6})
    assert default_threads(root=tmp_path) == 3


V1 = "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/box/cpu.cfs_period_us"


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/box\n", {"sys/fs/cgroup/box/cpu.max": "250000 100000\n"}, 2),
        ("0::/box\n", {"sys/fs/cgroup/box/cpu.max": "50000 100000\n"}, 1),
        ("0::/box\n", {"sys/fs/cgroup/box/cpu.max": "max 100000\n"}, 8),
        ("0::/box\n", {"sys/fs/cgroup/box/x": "", "sys/fs/cgroup/cpu.max": "300000 100000\n"}, 3),
        ("3:cpu,cpuacct:/box\n", {V1[0]: "400000\n", V1[1]: "100000\n"}, 4),
        ("3:cpu,cpuacct:/box\n", {V1[0]: "-1\n", V1[1]: "100000\n"}, 8),
        ("3:cpu,cpuacct:/box\n", {V1[0]: "400000\n"}, 8),
    ],
)
def test_a_quota_of_a_control_group_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, groups: str, files: dict[str, str], cores: int
) -> None:
    root = machine(monkeypatch, tmp_path, 8, files={"proc/self/cgroup": groups, **files})
    assert usable_cores(root) == cores
