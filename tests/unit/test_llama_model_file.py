"""Model files are understood, or refused with a reason, before native code sees them."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import pytest
from gguf.constants import GGML_QUANT_SIZES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from infervisor.worker.engine import LoadRefused
from infervisor.worker.engines.llama.gguf_header import BLOCKS
from infervisor.worker.engines.llama.model_file import check_model_file
from tests.helpers.models import BAD_FILES, CHATML, LOOP, bad_model_files, build_model, build_shards

NATIVE_ONLY = {"layers_missing", "no_heads", "odd_rope", "tensor_type", "unknown_architecture"}
"""Faults that only llama.cpp can tell."""

BadFiles = dict[str, tuple[Path, str]]


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> BadFiles:
    return bad_model_files(tmp_path_factory.mktemp("bad"))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model(tmp_path_factory.mktemp("good") / "good.gguf", LOOP, CHATML)


def test_every_bad_file_is_tried(bad_files: BadFiles) -> None:
    assert set(bad_files) == set(BAD_FILES)


@pytest.mark.parametrize("name", [name for name in BAD_FILES if name not in NATIVE_ONLY])
def test_bad_file_is_refused_with_its_code(bad_files: BadFiles, name: str) -> None:
    path, code = bad_files[name]
    with pytest.raises(LoadRefused) as refused:
        check_model_file(str(path))
    assert refused.value.code == code
    assert str(path) in str(refused.value)
    assert str(refused.value).isprintable()
    assert refused.value.permanent


@pytest.mark.parametrize("name", sorted(NATIVE_ONLY))
def test_what_only_native_code_can_tell_passes(bad_files: BadFiles, name: str) -> None:
    assert check_model_file(str(bad_files[name][0]))


def test_facts_of_a_good_file(good: Path) -> None:
    file = check_model_file(str(good))
    header = file.header
    assert header.architecture == "llama"
    assert header.number("{arch}.context_length") == 256
    assert header.per_layer("{arch}.attention.head_count_kv", 0) == [2]
    assert header.has_chat_template
    assert file.total_bytes == good.stat().st_size
    assert file.first_bytes == good.read_bytes()[: 1 << 20]


def test_no_path_is_refused() -> None:
    for nothing in (None, ""):
        with pytest.raises(LoadRefused) as refused:
            check_model_file(nothing)
        assert refused.value.code == "model_not_given"


def test_impossible_path_is_refused() -> None:
    for path in ("a\0b", "x" * 5000):
        with pytest.raises(LoadRefused) as refused:
            check_model_file(path)
        assert refused.value.code == "model_not_found"


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_unreadable_file_names_permission(good: Path, tmp_path: Path) -> None:
    locked = tmp_path / "locked.gguf"
    locked.write_bytes(good.read_bytes())
    locked.chmod(0)
    with pytest.raises(LoadRefused, match="permission denied") as refused:
        check_model_file(str(locked))
    assert refused.value.code == "model_unreadable"


def test_permission_error_names_permission(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str, _flags: int) -> int:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(LoadRefused, match="permission denied") as refused:
        check_model_file(str(good))
    assert refused.value.code == "model_unreadable"


def test_no_descriptor_is_left_open(bad_files: BadFiles, good: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    check_model_file(str(good))
    for path, _ in bad_files.values():
        try:
            check_model_file(str(path))
        except LoadRefused:
            continue
    assert len(os.listdir("/proc/self/fd")) == before


def test_terminal_codes_are_shown_escaped(bad_files: BadFiles) -> None:
    with pytest.raises(LoadRefused) as refused:
        check_model_file(str(bad_files["terminal_codes"][0]))
    assert r"\x1b[2J\x07" in str(refused.value)


def test_trailing_bytes_do_no_harm(good: Path, tmp_path: Path) -> None:
    longer = tmp_path / "longer.gguf"
    longer.write_bytes(good.read_bytes() + bytes(4096))
    assert check_model_file(str(longer)).header.architecture == "llama"


def test_header_alone_has_no_weights(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "vocabulary.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(LoadRefused) as refused:
        check_model_file(str(tmp_path / "vocabulary.gguf"))
    assert refused.value.code == "model_without_weights"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_cut_is_noticed(good: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = good.read_bytes()
    length = data.draw(st.one_of(st.integers(1, 20_000), st.integers(1, len(whole) - 1)))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[:length])
    with pytest.raises(LoadRefused) as refused:
        check_model_file(str(cut))
    assert refused.value.code == "model_truncated"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(4, 14_000), damage=st.binary(min_size=1, max_size=12))
def test_damage_never_raises_anything_else(good: Path, tmp_path: Path, at: int, damage: bytes) -> None:
    whole = bytearray(good.read_bytes())
    whole[at : at + len(damage)] = damage
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole)
    try:
        check_model_file(str(broken))
    except LoadRefused as refused:
        assert str(refused).isprintable()  # noqa: PT017 - not raising is as right as raising this


def test_block_sizes_agree_with_the_reference() -> None:
    reference = {int(kind): sizes for kind, sizes in GGML_QUANT_SIZES.items()}
    assert {kind: reference[kind] for kind in BLOCKS} == dict(BLOCKS)


def test_large_vocabulary_is_walked_whole(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list([f"token{number}" for number in range(100_000)])
    writer.add_uint32("after.all", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(LoadRefused) as refused:
        check_model_file(str(path))
    assert refused.value.code == "model_without_weights"
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(LoadRefused) as refused:
        check_model_file(str(path))
    assert refused.value.code == "model_truncated"


# --- models in several files ------------------------------------------------------------------------


def test_all_shards_are_counted(tmp_path: Path) -> None:
    first, second = build_shards(tmp_path)
    file = check_model_file(str(first))
    assert len(file.stamps) == 2
    assert file.total_bytes == first.stat().st_size + second.stat().st_size


def test_second_shard_points_to_the_first(tmp_path: Path) -> None:
    first, second = build_shards(tmp_path)
    with pytest.raises(LoadRefused, match=first.name) as refused:
        check_model_file(str(second))
    assert refused.value.code == "model_not_first_shard"


def test_missing_shard_is_named(tmp_path: Path) -> None:
    first, second = build_shards(tmp_path)
    second.unlink()
    with pytest.raises(LoadRefused, match=second.name) as refused:
        check_model_file(str(first))
    assert refused.value.code == "model_shard_missing"


def test_cut_shard_is_named(tmp_path: Path) -> None:
    first, second = build_shards(tmp_path)
    os.truncate(second, second.stat().st_size - 4096)
    with pytest.raises(LoadRefused, match=second.name) as refused:
        check_model_file(str(first))
    assert refused.value.code == "model_truncated"


def test_link_without_the_shard_name_is_refused(tmp_path: Path) -> None:
    first, _ = build_shards(tmp_path)
    link = tmp_path / "blob"
    link.symlink_to(first)
    with pytest.raises(LoadRefused, match="-00001-of-00002") as refused:
        check_model_file(str(link))
    assert refused.value.code == "model_shard_name"


def test_links_that_keep_the_shard_names_pass(tmp_path: Path) -> None:
    for number, shard in enumerate(build_shards(tmp_path), 1):
        (tmp_path / f"link-{number:05d}-of-00002.gguf").symlink_to(shard)
    path = str(tmp_path / "link-00001-of-00002.gguf")
    assert check_model_file(path).path == path
