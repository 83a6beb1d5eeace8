"""What a model takes is estimated by part, and compared with what is free, before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama.capacity import free_memory
from infervisor.worker.engines.llama.gguf_header import GgufHeader, TensorInfo, Value
from infervisor.worker.engines.llama.memory_estimate import (
    FreeMemory,
    compute_bytes,
    estimate,
    fit_context,
    kv_cache_bytes,
)
from infervisor.worker.engines.llama.options import LlamaOptions

ONE = LlamaOptions(slots=1)
MIB = 1 << 20
FILE_BYTES = 700 * MIB


def header_of(family: str = "llama", **more: Value) -> GgufHeader:
    """Return the header of a model of six layers, 1024 wide; names of `more` are without the family."""
    values: dict[str, Value] = {
        "general.architecture": family,
        f"{family}.block_count": 6,
        f"{family}.embedding_length": 1024,
        f"{family}.feed_forward_length": 4096,
        f"{family}.attention.head_count": 16,
        f"{family}.attention.head_count_kv": 4,
        f"{family}.context_length": 32768,
    }
    values |= {f"{family}.{name.replace('__', '.')}": value for name, value in more.items()}
    tensors = {
        "token_embd.weight": TensorInfo(2, (1024, 30_000), 1024 * 30_000 * 18 // 32),
        "output.weight": TensorInfo(2, (1024, 30_000), 1024 * 30_000 * 18 // 32),
    }
    return GgufHeader(3, values, frozenset(values), 60, tensors)


HEADER = header_of()
CELL_BYTES = 6 * 4 * 64 * (2 + 2)
"""Layers, heads, width of a head, bytes of a key and a value."""


# --- parts -------------------------------------------------------------------------------------------


def test_kv_counts_whole_cells_of_every_slot() -> None:
    assert kv_cache_bytes(HEADER, ONE, 512) == 512 * CELL_BYTES
    assert kv_cache_bytes(HEADER, ONE, 513) == 768 * CELL_BYTES
    assert kv_cache_bytes(HEADER, LlamaOptions(slots=3), 512) == 3 * 512 * CELL_BYTES
    assert kv_cache_bytes(HEADER, LlamaOptions(slots=1, kv_type_k="f32"), 512) == 512 * CELL_BYTES * 6 // 4


def test_kv_heads_may_differ_by_layer_and_be_shared() -> None:
    some = header_of(attention__head_count_kv=(4, 4, 0, 0, 0, 0))
    assert kv_cache_bytes(some, ONE, 512) == 512 * CELL_BYTES // 3
    shared = header_of(attention__shared_kv_layers=3)
    assert kv_cache_bytes(shared, ONE, 512) == 512 * CELL_BYTES // 2


@pytest.mark.parametrize(
    ("family", "pattern", "dense_layers"),
    [
        ("gemma3", None, 1),
        ("gemma2", None, 3),
        ("other", None, 6),
        ("other", 3, 2),
        ("other", (True, True, True, True, False, False), 2),
        ("other", (True, True), 4),
    ],
)
def test_sliding_layers_keep_a_window_unless_told_to_keep_all(
    family: str, pattern: Value | None, dense_layers: int
) -> None:
    more: dict[str, Value] = {"attention__sliding_window": 512}
    if pattern is not None:
        more["attention__sliding_window_pattern"] = pattern
    header = header_of(family, **more)
    layer = CELL_BYTES // 6
    assert kv_cache_bytes(header, ONE, 4096) == 6 * 4096 * layer
    # The window and one micro-batch.
    kept = kv_cache_bytes(header, LlamaOptions(slots=1, swa_full=False), 4096)
    assert kept == (dense_layers * 4096 + (6 - dense_layers) * 1024) * layer
    assert kv_cache_bytes(header, LlamaOptions(slots=1, swa_full=False), 512) == 6 * 512 * layer


def test_compute_is_the_widest_moment() -> None:
    options = LlamaOptions(slots=1, ubatch=512)
    # Logits of every token, the whole vocabulary wide, and one more row for the output.
    assert compute_bytes(HEADER, options, 4096) == 4 * (512 * (30_000 + 2 * 1024) + 30_000)
    assert (
        compute_bytes(HEADER, LlamaOptions(slots=1, ubatch=128), 4096)
        < compute_bytes(HEADER, options, 4096) / 3
    )
    # Without flash attention, every head's scores against every cell.
    scores = compute_bytes(HEADER, LlamaOptions(slots=1, flash_attention=False), 32768)
    assert scores > 4 * 512 * 16 * 32768
    wide = header_of(feed_forward_length=20_000)
    assert compute_bytes(wide, options, 4096) > 4 * 512 * 3 * 20_000
    mixed = header_of(expert_used_count=8, expert_feed_forward_length=2048)
    assert compute_bytes(mixed, options, 4096) > 4 * 512 * 3 * 8 * 2048


def test_a_micro_batch_is_no_larger_than_the_batch_or_the_context() -> None:
    small = compute_bytes(HEADER, LlamaOptions(slots=1, ubatch=256), 256)
    assert compute_bytes(HEADER, LlamaOptions(slots=1, ubatch=512), 256) == small
    assert compute_bytes(HEADER, LlamaOptions(slots=1, ubatch=512, batch_tokens=256), 256) == small


def test_an_output_matrix_that_is_the_embedding_is_kept_twice_when_laid_out_anew() -> None:
    embedding = HEADER.tensors["token_embd.weight"]
    tied = replace(HEADER, tensors={"token_embd.weight": embedding})
    assert embedding.bytes is not None
    assert estimate(HEADER, FILE_BYTES, ONE, 512).weights == FILE_BYTES
    assert estimate(tied, FILE_BYTES, ONE, 512).weights == FILE_BYTES + embedding.bytes
    assert estimate(tied, FILE_BYTES, LlamaOptions(slots=1, reproducible=True), 512).weights == FILE_BYTES
    plain = replace(tied, tensors={"token_embd.weight": replace(embedding, kind=8)})
    assert estimate(plain, FILE_BYTES, ONE, 512).weights == FILE_BYTES


def test_a_header_that_says_nothing_gives_an_estimate_all_the_same() -> None:
    bare = GgufHeader(3, {"general.architecture": "x"}, frozenset(), 1)
    # Only the mask is known, of half floats.
    assert estimate(bare, 100, ONE, 4096).total == 100 + 4096 * 512 * 2


# --- the decision ------------------------------------------------------------------------------------


def free_for(tokens: int, options: LlamaOptions | None = None) -> FreeMemory:
    return FreeMemory(estimate(HEADER, FILE_BYTES, options or ONE, tokens).total, 1 << 50)


def test_what_fits_exactly_is_loaded_as_it_is() -> None:
    fitted = fit_context(HEADER, FILE_BYTES, ONE, 8192, free_for(8192))
    assert (fitted.tokens, fitted.reduced_from) == (8192, None)
    facts = fitted.to_facts()
    assert facts == {"memory_estimate_bytes": fitted.estimate.to_facts()}
    assert sum(fitted.estimate.to_facts().values()) == fitted.estimate.total


def test_a_byte_too_little_is_refused_and_may_pass() -> None:
    free = FreeMemory(free_for(8192).total - 1, 1 << 50, "this box")
    with pytest.raises(LoadRefused) as refused:
        fit_context(HEADER, FILE_BYTES, ONE, 8192, free)
    assert refused.value.code == "out_of_memory"
    assert not refused.value.permanent
    wanted = estimate(HEADER, FILE_BYTES, ONE, 8192)
    for said in (
        "8192 tokens in 1 slot", f"weights {wanted.weights / 1e9:.2f} GB", f"KV cache {wanted.kv / 1e9:.2f} GB",
        f"buffers {wanted.compute / 1e9:.2f} GB", f"this box has {free.total / 1e9:.2f} GB free",
        "n_ctx=7936 would fit", "fit_context=true", "check_memory=false",
    ):  # fmt: skip
        assert said in str(refused.value)
    assert "slots;" not in str(refused.value)


def test_what_exceeds_all_memory_is_refused_for_good() -> None:
    needed = free_for(8192).total
    for of_all, permanent in ((needed - 1, True), (needed, False)):
        with pytest.raises(LoadRefused) as refused:
            fit_context(HEADER, FILE_BYTES, ONE, 8192, FreeMemory(needed - 1, of_all))
        assert refused.value.permanent is permanent


@pytest.mark.parametrize("fits", [512, 768, 7936])
def test_the_largest_context_that_fits_is_chosen_on_request(fits: int) -> None:
    options = LlamaOptions(slots=1, fit_context=True)
    for spare in (0, 255 * CELL_BYTES):
        fitted = fit_context(
            HEADER, FILE_BYTES, options, 8192, FreeMemory(free_for(fits).total + spare, 1 << 50)
        )
        assert (fitted.tokens, fitted.reduced_from) == (fits, 8192)
        assert fitted.to_facts()["context_reduced_from"] == 8192
        assert fitted.estimate == estimate(HEADER, FILE_BYTES, options, fits)


@pytest.mark.parametrize(
    ("wanted", "free", "advice"),
    [
        (8192, free_for(512).total - 1, "free some memory"),
        (256, free_for(256).total - 1, "free some memory"),
        (8192, 100 * MIB, "smaller model"),
    ],
)
def test_no_context_that_is_worth_having_fits(wanted: int, free: int, advice: str) -> None:
    with pytest.raises(LoadRefused, match=advice) as refused:
        fit_context(
            HEADER, FILE_BYTES, LlamaOptions(slots=1, fit_context=True), wanted, FreeMemory(free, 1 << 50)
        )
    assert "would fit" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        (LlamaOptions(slots=8), "lower slots"),
        (LlamaOptions(slots=8), "kv_type_k='q8_0'"),
        (LlamaOptions(slots=1, flash_attention=False), "lower ubatch"),
    ],
)
def test_the_advice_follows_the_largest_part(options: LlamaOptions, advice: str) -> None:
    with pytest.raises(LoadRefused, match=advice):
        fit_context(HEADER, FILE_BYTES, options, 32768, FreeMemory(FILE_BYTES, 1 << 50))


@pytest.mark.parametrize(("room", "slots"), [(4, 4), (3, 3), (2, 2), (1, 1)])
def test_slots_that_nobody_asked_for_give_way(room: int, slots: int) -> None:
    for options in (LlamaOptions(), LlamaOptions(fit_context=True)):
        free = free_for(8192, LlamaOptions(slots=room))
        fitted = fit_context(HEADER, FILE_BYTES, options, 8192, free)
        assert (fitted.tokens, fitted.slots, fitted.reduced_from) == (8192, slots, None)
        assert fitted.estimate.total == free.total
        assert fitted.slots_reduced_from == (4 if slots < 4 else None)
        assert fitted.to_facts().get("slots_reduced_from") == fitted.slots_reduced_from


def test_slots_that_were_asked_for_stay() -> None:
    free = free_for(8192, LlamaOptions(slots=3))
    with pytest.raises(LoadRefused, match=r"in 4 slot.*lower slots"):
        fit_context(HEADER, FILE_BYTES, LlamaOptions(slots=4), 8192, free)
    fitted = fit_context(HEADER, FILE_BYTES, LlamaOptions(slots=4, fit_context=True), 8192, free)
    assert fitted.slots == 4
    assert fitted.reduced_from == 8192


def test_a_context_too_large_for_one_slot_gives_way_after_the_slots() -> None:
    free = free_for(1024)
    with pytest.raises(LoadRefused, match=r"in 1 slot.*n_ctx=1024 would fit"):
        fit_context(HEADER, FILE_BYTES, LlamaOptions(), 8192, free)
    fitted = fit_context(HEADER, FILE_BYTES, LlamaOptions(fit_context=True), 8192, free)
    assert (fitted.tokens, fitted.slots) == (1024, 1)
    assert fitted.to_facts()["slots_reduced_from"] == 4


def test_nothing_is_refused_on_a_device_or_unasked() -> None:
    for options, free in ((LlamaOptions(n_gpu_layers=-1), FreeMemory(0, 0)), (LlamaOptions(), None)):
        assert fit_context(HEADER, FILE_BYTES, options, 8192, free).tokens == 8192
        assert fit_context(HEADER, FILE_BYTES, options, 8192, free).slots == 4


# --- what is free ------------------------------------------------------------------------------------


def surroundings(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    (root / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(text)
    return root


STAT = "anon 5\ninactive_file 1000\nactive_file 500\nfile 9999\n"
STAT_V1 = "inactive_file 1\nactive_file 1\ntotal_inactive_file 1000\ntotal_active_file 500\n"


def test_the_machine_is_the_limit_without_groups(tmp_path: Path) -> None:
    assert free_memory(surroundings(tmp_path, "0::/\n", {})) == FreeMemory(8000 * 1024, 9000 * 1024)


def test_the_tightest_level_of_version_2_counts(tmp_path: Path) -> None:
    root = surroundings(
        tmp_path,
        "0::/a/b\n",
        {
            "a/b/memory.max": "max\n", "a/b/memory.current": "300000\n", "a/b/memory.stat": STAT,
            "a/memory.max": "1000000\n", "a/memory.current": "400000\n", "a/memory.stat": STAT,
            "memory.stat": STAT,
        },
    )  # fmt: skip
    assert free_memory(root) == FreeMemory(1000000 - 400000 + 1500, 1000000, "this process's control group")


def test_a_limit_of_version_1_counts(tmp_path: Path) -> None:
    top = {
        "memory/memory.limit_in_bytes": "9223372036854771712\n",
        "memory/memory.usage_in_bytes": "5\n",
        "memory/memory.stat": STAT_V1,
    }
    own = {
        "memory/x/memory.limit_in_bytes": "50000\n",
        "memory/x/memory.usage_in_bytes": "60000\n",
        "memory/x/memory.stat": STAT_V1,
    }
    lines = "9:name=systemd:/y\n4:hugetlb,memory:/x\n0::/\n"
    assert free_memory(surroundings(tmp_path / "tight", lines, top | own)).total == 0
    assert free_memory(surroundings(tmp_path / "none", lines, top)) == FreeMemory(8000 * 1024, 9000 * 1024)


def test_a_container_that_sees_only_its_own_group(tmp_path: Path) -> None:
    files = {"memory.max": "70000\n", "memory.current": "1000\n", "memory.stat": "inactive_file 0\n"}
    for name, path in (("host", "/docker/0123"), ("outside", "/../../other")):
        assert free_memory(surroundings(tmp_path / name, f"0::{path}\n", files)).total == 69000


def test_here_and_now_it_is_what_psutil_says() -> None:
    import psutil

    available = psutil.virtual_memory().available
    assert free_memory().total <= available * 1.1
    if free_memory().whose == "this machine":
        assert free_memory().total == pytest.approx(available, rel=0.1)


def test_a_system_without_proc_counts_its_pages(tmp_path: Path) -> None:
    assert free_memory(tmp_path).total > MIB
