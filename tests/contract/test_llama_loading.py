"""Loading a GGUF through the engine: reasons for refusals, effective numbers, nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infervisor.protocol.errors import InvalidRequest
from infervisor.worker.engine import AbortGranularity, LoadRefused
from infervisor.worker.engines.llama.capacity import default_threads
from infervisor.worker.engines.llama.engine import LlamaEngine
from tests.helpers.adapters import build_adapter
from tests.helpers.engine_models import answer, no_progress, open_in, request
from tests.helpers.models import BAD_FILES, CHATML, LOOP, TOKEN, bad_model_files, build_model, build_shards

USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    return bad_model_files(tmp_path_factory.mktemp("bad"))


@pytest.fixture
def engine() -> Iterator[LlamaEngine]:
    fresh = LlamaEngine()
    yield fresh
    fresh.close()


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file_is_refused_with_its_code(
    engine: LlamaEngine, bad_files: dict[str, tuple[Path, str]], table_models: Path, name: str
) -> None:
    path, code = bad_files[name]
    with pytest.raises(LoadRefused) as refused:
        engine.load(str(path), {"threads": 1}, no_progress)
    assert refused.value.code == code
    assert str(path) in str(refused.value)
    engine.load(str(table_models / "loop.gguf"), {"threads": 1}, no_progress)
    assert answer(engine, request("c"), 3).text == "abc"


def test_native_log_is_in_the_refusal(engine: LlamaEngine, bad_files: dict[str, tuple[Path, str]]) -> None:
    with pytest.raises(LoadRefused, match="unknown model architecture: 'zzama'"):
        engine.load(str(bad_files["unknown_architecture"][0]), {}, no_progress)


def test_native_log_is_escaped(engine: LlamaEngine, tmp_path: Path) -> None:
    path = tmp_path / "wild.gguf"
    path.write_bytes(build_model(tmp_path / "good.gguf", LOOP).read_bytes().replace(b"llama", b"z\x1b[2J"))
    with pytest.raises(LoadRefused) as refused:
        engine.load(str(path), {}, no_progress)
    assert "\x1b" not in str(refused.value)
    assert r"z\x1b[2J" in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "effective"),
    [(None, 256), (0, 256), (32, 256), (64, 256), (256, 256), (257, 512), (1000, 1024)],
)
def test_effective_context_is_reported_and_kept(
    engine: LlamaEngine, table_models: Path, asked: int | None, effective: int
) -> None:
    options = {"n_ctx": asked, "slots": 2, "threads": 1}
    facts = engine.load(str(table_models / "loop.gguf"), options, no_progress)
    assert facts.context_tokens == effective
    fitting = "a" * (effective - 3)
    opened = open_in(engine, 0, request(fitting))
    engine.release(0)
    longest = fitting + "a" * (effective - 1 - opened.prompt_tokens)
    assert open_in(engine, 0, request(longest)).prompt_tokens == effective - 1
    engine.release(0)
    assert len(answer(engine, request(longest), 1).tokens) == 1
    with pytest.raises(InvalidRequest, match=f"{effective} tokens.*{effective}") as refused:
        open_in(engine, 0, request(longest + "a"))
    assert refused.value.field == "prompt"


def test_whole_context_can_be_filled(engine: LlamaEngine, table_models: Path) -> None:
    facts = engine.load(str(table_models / "loop.gguf"), {"threads": 1}, no_progress)
    opened = open_in(engine, 0, request("c"))
    engine.release(0)
    said = answer(engine, request("c"), facts.context_tokens - opened.prompt_tokens)
    assert len(said.tokens) == facts.context_tokens - opened.prompt_tokens
    assert said.text == ("abc" * 256)[: len(said.tokens)]


def test_hopelessly_long_prompt_is_refused_early(engine: LlamaEngine, table_models: Path) -> None:
    engine.load(str(table_models / "loop.gguf"), {"threads": 1}, no_progress)
    with pytest.raises(InvalidRequest, match=r"more than .* tokens.*256") as refused:
        open_in(engine, 0, request("abc" * 1_000_000))
    assert refused.value.field == "prompt"


def test_small_batches_serve_many_slots(engine: LlamaEngine, table_models: Path) -> None:
    options = {"slots": 24, "batch_tokens": 8, "ubatch": 8, "threads": 1}
    engine.load(str(table_models / "loop.gguf"), options, no_progress)
    slots = list(range(24))
    for slot in slots:
        open_in(engine, slot, request("abc"[slot % 3] * (1 + slot)))
    texts = [b""] * 24
    while min(map(len, texts)) < 6:
        for slot, outcome in zip(slots, engine.step(slots) or pytest.fail("cut"), strict=True):
            texts[slot] += getattr(outcome, "data", b"")
    for slot in slots:
        assert texts[slot][:6] == (b"abcabcabc" * 2)[slot % 3 + 1 :][:6]
        engine.release(slot)


def test_interrupt_in_a_mixed_step_hides_no_finished_prefill(engine: LlamaEngine, table_models: Path) -> None:
    # One slot's last slice is finished and the other's is then cut: the step reports nothing, and the
    # first slot's next step must still report its prefill before it gives a token.
    options = {"slots": 2, "threads": 1, "reproducible": True}
    engine.load(str(table_models / "loop.gguf"), options, no_progress)
    open_in(engine, 0, request("c"))
    open_in(engine, 1, request("a" * 100))
    decoder = engine._decoder
    assert decoder is not None
    prefill = decoder.prefill

    def cut_the_second(slot: int, tokens: list[int], start: int, end: int) -> tuple[int, bool]:
        if slot == 1:
            engine.interrupt()
        return prefill(slot, tokens, start, end)

    decoder.prefill = cut_the_second  # type: ignore[method-assign]
    assert engine.step([0, 1]) is None
    decoder.prefill = prefill  # type: ignore[method-assign]
    engine.clear_interrupt()
    outcomes = engine.step([0])
    assert outcomes is not None
    assert not hasattr(outcomes[0], "token")
    assert answer_of(engine, 0, 3) == b"abc"
    assert answer_of(engine, 1, 3) == b"bca"


def answer_of(engine: LlamaEngine, slot: int, length: int) -> bytes:
    data = b""
    while len(data) < length:
        data += getattr((engine.step([slot]) or pytest.fail("cut"))[0], "data", b"")
    return data


@pytest.mark.parametrize(
    "options",
    [
        {"use_mmap": False}, {"use_mlock": True}, {"flash_attention": True}, {"flash_attention": False},
        {"kv_type_k": "bf16"}, {"kv_type_k": "f32", "kv_type_v": "f32"},
        {"swa_full": False}, {"threads": 2, "threads_batch": 1}, {"reproducible": True}, {"ubatch": 8},
        {"n_gpu_layers": -1}, {"tensor_split": [1.0]}, {"rope_freq_scale": 0.5, "rope_freq_base": 5000.0},
    ],
    ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items()),
)  # fmt: skip
def test_options_reach_the_library(engine: LlamaEngine, table_models: Path, options: dict[str, Any]) -> None:
    facts = engine.load(str(table_models / "loop.gguf"), {"threads": 1, **options}, no_progress)
    assert answer(engine, request("a" * 50), 6).text == "bcabca"
    assert facts.extra["threads"] == options.get("threads", 1)


def test_facts_say_what_is_in_use(engine: LlamaEngine, table_models: Path) -> None:
    options = {
        "n_ctx": 200, "slots": 3, "threads": 2, "threads_batch": 1, "batch_tokens": 64, "ubatch": 16,
        "kv_type_k": "bf16", "kv_type_v": "f32", "flash_attention": False, "swa_full": False, "use_mmap": False,
        "n_gpu_layers": -1, "tensor_split": [1.0], "rope_freq_base": 5000.0, "rope_freq_scale": 0.5,
        "prefix_reuse": False,
    }  # fmt: skip
    facts = engine.load(str(table_models / "loop.gguf"), options, no_progress)
    told = {
        "n_ctx": 768, "slots": 3, "threads": 2, "threads_batch": 1, "threads_adapt": False, "batch_tokens": 64,
        "ubatch": 16, "kv_type_k": "bf16", "kv_type_v": "f32", "flash_attention": False, "swa_full": False,
        "use_mmap": False, "use_mlock": False, "gpu_layers": 0, "tensor_split": [1.0], "split_mode": "layer",
        "main_gpu": 0, "rope_freq_base": 5000.0, "rope_freq_scale": 0.5, "prefix_reuse": False, "lora": [],
    }  # fmt: skip
    assert {name: facts.extra[name] for name in told} == told
    assert facts.slots == 3


def test_facts_say_what_the_library_chose(engine: LlamaEngine, table_models: Path) -> None:
    facts = engine.load(str(table_models / "loop.gguf"), {}, no_progress)
    assert facts.slots == 4
    assert facts.extra["flash_attention"] in (True, False), "auto is no answer"
    assert (facts.extra["rope_freq_base"], facts.extra["rope_freq_scale"]) == (10000.0, 1.0)
    assert facts.extra["threads"] == facts.extra["threads_batch"] == facts.extra["cores"] == default_threads()
    assert facts.extra["threads_adapt"] is (default_threads() > 1)


def test_workers_share_the_cores(engine: LlamaEngine, table_models: Path) -> None:
    engine.use_share(1000)
    facts = engine.load(str(table_models / "loop.gguf"), {}, no_progress)
    assert facts.extra["threads"] == 1


def test_cache_type_that_the_model_cannot_have(engine: LlamaEngine, table_models: Path) -> None:
    # Its heads are 144 wide, which the blocks of 32 don't divide.
    with pytest.raises(LoadRefused, match="does not divide") as refused:
        engine.load(str(table_models / "loop.gguf"), {"kv_type_k": "q8_0"}, no_progress)
    assert refused.value.code == "bad_option"


def test_fingerprint_follows_what_changes_results(table_models: Path, tmp_path: Path) -> None:
    path = tmp_path / "loop.gguf"
    path.write_bytes((table_models / "loop.gguf").read_bytes())

    def fingerprint(**options: Any) -> str:
        engine = LlamaEngine()
        try:
            return engine.load(str(path), {"threads": 1, **options}, no_progress).fingerprint
        finally:
            engine.close()

    plain = fingerprint()
    for same in ({"threads": 2}, {"slots": 1}, {"slots": 7}, {"prefix_reuse": False}, {"lora": []}):
        assert fingerprint(**same) == plain
    adapter = str(build_adapter(tmp_path / "a.gguf", {}))
    others = {
        fingerprint(reproducible=True), fingerprint(kv_type_k="bf16"), fingerprint(n_ctx=512),
        fingerprint(lora=adapter), fingerprint(lora={"path": adapter, "scale": 0.5}),
    }  # fmt: skip
    os.utime(path, ns=(1, 1))
    others.add(fingerprint())
    assert len(others | {plain}) == 7


def test_an_adapter_changes_the_answer_and_is_in_the_facts(
    engine: LlamaEngine, table_models: Path, tmp_path: Path
) -> None:
    adapter = str(build_adapter(tmp_path / "a.gguf", {TOKEN["a"]: TOKEN["c"]}))
    facts = engine.load(str(table_models / "loop.gguf"), {"threads": 1, "lora": adapter}, no_progress)
    assert facts.extra["lora"] == [{"path": adapter, "name": "a", "scale": 1.0}]
    assert answer(engine, request("c"), 4).text == "acac"


def test_an_adapter_that_does_not_fit_ends_the_load(
    engine: LlamaEngine, table_models: Path, tmp_path: Path
) -> None:
    path = str(table_models / "loop.gguf")
    wrong = str(build_adapter(tmp_path / "a.gguf", {}, size=64))
    with pytest.raises(LoadRefused, match="incorrect shape") as refused:
        engine.load(path, {"threads": 1, "lora": [wrong]}, no_progress)
    assert refused.value.code == "adapter_mismatch"
    engine.load(path, {"threads": 1}, no_progress)
    assert answer(engine, request("c"), 3).text == "abc"


def test_abort_granularity_without_a_device(engine: LlamaEngine, table_models: Path) -> None:
    facts = engine.load(str(table_models / "loop.gguf"), {"threads": 1}, no_progress)
    assert facts.abort is AbortGranularity.NODE


def test_shards_load_from_the_first(engine: LlamaEngine, tmp_path: Path) -> None:
    first, _ = build_shards(tmp_path)
    engine.load(str(first), {"threads": 1}, no_progress)
    assert answer(engine, request("c"), 4).text == "abca"


def test_paths_of_any_letters_load(engine: LlamaEngine, tmp_path: Path) -> None:
    folder = tmp_path / "d ié 模型"
    folder.mkdir()
    path = build_model(folder / "m 🦙.gguf", LOOP)
    engine.load(str(path), {"threads": 1}, no_progress)
    assert answer(engine, request("c"), 3).text == "abc"


def test_unlinked_file_keeps_working(engine: LlamaEngine, tmp_path: Path) -> None:
    path = build_model(tmp_path / "m.gguf", LOOP)
    engine.load(str(path), {"threads": 1}, no_progress)
    path.unlink()
    assert answer(engine, request("c"), 3).text == "abc"


def test_exception_in_progress_ends_the_load(engine: LlamaEngine, table_models: Path) -> None:
    def refuse(phase: str, _fraction: float) -> None:
        if phase == "load":
            raise BrokenPipeError("the reader is gone")

    with pytest.raises(BrokenPipeError, match="the reader is gone"):
        engine.load(str(table_models / "loop.gguf"), {}, refuse)
    engine.load(str(table_models / "loop.gguf"), {"threads": 1}, no_progress)
    assert answer(engine, request("c"), 3).text == "abc"


# --- templates and misuse ---------------------------------------------------------------------------


def test_broken_template_leaves_raw_prompts(engine: LlamaEngine, table_models: Path) -> None:
    facts = engine.load(str(table_models / "template_broken.gguf"), {"threads": 1}, no_progress)
    assert not facts.has_chat_template
    assert "TemplateSyntaxError" in facts.extra["template_error"]
    with pytest.raises(InvalidRequest, match="the model's chat template can't be compiled"):
        open_in(engine, 0, request(messages=[USER]))
    assert answer(engine, request("c"), 3).text == "abc"


def test_model_without_template_says_so(engine: LlamaEngine, table_models: Path) -> None:
    facts = engine.load(str(table_models / "loop.gguf"), {"threads": 1}, no_progress)
    assert not facts.has_chat_template
    assert facts.extra["template_error"] is None
    with pytest.raises(InvalidRequest, match=r"has no chat template.*prompt="):
        open_in(engine, 0, request(messages=[USER]))


def test_template_option_stands_in(engine: LlamaEngine, table_models: Path) -> None:
    options = {"threads": 1, "chat_template": CHATML}
    facts = engine.load(str(table_models / "template_broken.gguf"), options, no_progress)
    assert facts.has_chat_template
    assert answer(engine, request(messages=[USER]), 3).text == "abc"


def test_an_endless_template_is_given_up_and_raw_prompts_go_on(
    engine: LlamaEngine, table_models: Path
) -> None:
    engine.load(str(table_models / "template_endless.gguf"), {"threads": 1}, no_progress)
    with pytest.raises(InvalidRequest):
        engine.prepare(request(messages=[USER]))
    assert answer(engine, request("c"), 3).text == "abc"


@pytest.mark.parametrize("both", [True, False])
def test_exactly_one_of_prompt_and_messages(engine: LlamaEngine, table_models: Path, both: bool) -> None:
    engine.load(str(table_models / "chatml.gguf"), {"threads": 1}, no_progress)
    with pytest.raises(InvalidRequest, match="exactly one"):
        open_in(engine, 0, request("c", [USER]) if both else request())


def test_foreign_delivered_token_is_refused(engine: LlamaEngine, table_models: Path) -> None:
    facts = engine.load(str(table_models / "loop.gguf"), {"threads": 1}, no_progress)
    with pytest.raises(InvalidRequest) as refused:
        open_in(engine, 0, request("c", delivered=[facts.vocabulary_tokens]))
    assert refused.value.field == "delivered"


def test_misuse_is_named(engine: LlamaEngine, table_models: Path) -> None:
    with pytest.raises(RuntimeError, match="no model is loaded"):
        open_in(engine, 0, request("c"))
    engine.interrupt()
    engine.load(str(table_models / "loop.gguf"), {"threads": 1}, no_progress)
    with pytest.raises(RuntimeError, match="loaded a model already"):
        engine.load(str(table_models / "loop.gguf"), {"threads": 1}, no_progress)
    with pytest.raises(RuntimeError, match="slot 0 is free"):
        engine.step([0])
    open_in(engine, 0, request("c"))
    with pytest.raises(RuntimeError, match="slot 0 is taken"):
        open_in(engine, 0, request("c"))
    engine.release(0)
    engine.release(0)
    engine.close()
    with pytest.raises(RuntimeError, match="no model is loaded"):
        open_in(engine, 0, request("c"))
