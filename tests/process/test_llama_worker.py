"""llama.cpp in a worker process, on models whose answers are known: what it refuses, and what stays exact."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from infervisor import (
    DeadlineExceeded,
    Deadlines,
    EndReason,
    InvalidRequest,
    ModelLoadError,
    Stage,
    Supervisor,
)
from infervisor.supervisor.events import BreakerOpened, ModelFileChanged, WorkerSpawned
from tests.helpers.inside import PATIENT, until
from tests.helpers.models import (
    LOOP,
    TOKEN,
    VOCABULARY,
    bad_model_files,
    build_model,
    build_models,
    build_shards,
)
from tests.helpers.supervised import QUICK_GRACES, QUICK_RESTART, Told

pytestmark = pytest.mark.anyio

USER = {"role": "user", "content": "c"}
CONTEXT_TOKENS = 256
EXTRA_TOKENS = 2
"""What comes before the letters of a raw prompt: its beginning and a blank."""
REFUSED_FILES = (
    "empty", "lfs_pointer", "web_page", "terminal_codes", "empty_key", "huge_key", "huge_string", "huge_array",
    "many_keys", "layers_huge", "cut_half", "unknown_architecture", "folder", "missing",
)  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory that holds every table model."""
    return build_models(tmp_path_factory.mktemp("models"))


@asynccontextmanager
async def llama(path: Path | str, **options: Any) -> AsyncIterator[tuple[Supervisor, Told]]:
    """Yield a supervisor of a model on the llama engine, and what it tells."""
    told = Told()
    async with Supervisor(
        path,
        options={"threads": 1, **options},
        escalation=PATIENT,
        restart=QUICK_RESTART,
        graces=QUICK_GRACES,
        on_event=told,
    ) as supervisor:
        yield supervisor, told


async def is_exact(supervisor: Supervisor, told: Told) -> None:
    """The loop model's worker is unharmed, and the first one still."""
    answer = await supervisor.generate("c", max_tokens=5)
    assert answer.text == "abcab"
    assert len(told.of(WorkerSpawned)) == 1


def exists(path: Path) -> bool:
    """Whether something is there."""
    return path.exists()


# --- loading -----------------------------------------------------------------------------------------


async def test_a_file_that_cannot_be_loaded_is_told_once_and_costs_the_parent_nothing(tmp_path: Path) -> None:
    files = bad_model_files(tmp_path)
    parent = psutil.Process()
    before_bytes = parent.memory_info().rss
    for name in REFUSED_FILES:
        path, code = files[name]
        told = Told()
        with pytest.raises(ModelLoadError) as caught:
            async with Supervisor(path, on_event=told):
                pytest.fail(f"{name} was loaded")
        assert caught.value.code == code
        assert path.name in str(caught.value)
        for text in (str(caught.value), caught.value.detail):
            assert all(character.isprintable() or character in "\n\t" for character in text), name
        assert len(told.of(WorkerSpawned)) == len(told.of(BreakerOpened)) == 1, name
    assert parent.memory_info().rss - before_bytes < 32 << 20


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"n_ctx": 1}, "bad_option"),
        ({"n_ctx": -1}, "bad_option"),
        ({"n_ctx": 200_000_000}, "out_of_memory"),
        ({"threads": 100_000}, "bad_option"),
        ({"threads": 0}, "bad_option"),
    ],
    ids=str,
)
async def test_options_that_would_crash_the_library_are_refused_by_name(
    models: Path, options: dict[str, int], code: str
) -> None:
    told = Told()
    with pytest.raises(ModelLoadError) as caught:
        async with Supervisor(models / "loop.gguf", options=options, on_event=told):
            pytest.fail("it was loaded")
    assert caught.value.code == code
    assert next(iter(options)) in str(caught.value)
    assert len(told.of(WorkerSpawned)) == 1


async def test_a_relative_path_is_meant_from_where_the_supervisor_was_made(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(models)
    async with llama("loop.gguf") as (supervisor, told):
        monkeypatch.chdir(tmp_path)
        supervisor.restart_worker()
        await told.wait_for(WorkerSpawned, count=2)
        assert (await supervisor.generate("c", max_tokens=3)).text == "abc"


async def test_links_to_shards_load_by_the_names_of_the_links(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for number, shard in enumerate(build_shards(tmp_path)):
        blob = shard.rename(tmp_path / f"blob{number}")
        (snapshot / shard.name).symlink_to(blob)
    async with llama(snapshot / "loop-00001-of-00002.gguf") as (supervisor, told):
        await is_exact(supervisor, told)


async def test_a_file_that_is_overwritten_under_its_worker_is_told_and_one_that_is_unlinked_goes_on(
    tmp_path: Path,
) -> None:
    path = build_model(tmp_path / "m.gguf", LOOP)
    async with llama(path) as (supervisor, told):
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        spoilt = await supervisor.generate("c", max_tokens=3)
        assert ["model file changed" in warning for warning in spoilt.report.warnings] == [True]
        assert len(told.of(ModelFileChanged)) == 1
    path = build_model(tmp_path / "n.gguf", LOOP)
    async with llama(path) as (supervisor, told):
        path.unlink()
        await is_exact(supervisor, told)


# --- prompts and limits ------------------------------------------------------------------------------


async def test_a_prompt_longer_than_a_batch_is_read_in_several(models: Path) -> None:
    async with llama(models / "loop.gguf", batch_tokens=32, ubatch=32) as (supervisor, told):
        for letters in (29, 30, 31, 62, 63, 100):
            answer = await supervisor.generate("a" * letters, max_tokens=6)
            assert answer.report.usage.prompt_tokens == letters + EXTRA_TOKENS
            assert answer.text == "bcabca"
        await is_exact(supervisor, told)


async def test_the_context_is_filled_to_its_last_token_and_not_one_more_is_taken(models: Path) -> None:
    async with llama(models / "loop.gguf") as (supervisor, told):
        assert supervisor.status().facts["context_tokens"] == CONTEXT_TOKENS
        for room in (2, 1):
            full = await supervisor.generate("a" * (CONTEXT_TOKENS - EXTRA_TOKENS - room))
            assert full.text == "bc"[:room]
            assert full.report.usage.completion_tokens == room
            assert full.report.end_reason is EndReason.CONTEXT_FULL
        for over in (0, 1, 1000):
            with pytest.raises(InvalidRequest) as caught:
                await supervisor.generate("a" * (CONTEXT_TOKENS - EXTRA_TOKENS + over))
            assert caught.value.field == "prompt"
            assert f"holds {CONTEXT_TOKENS}" in str(caught.value)
        for max_tokens in (None, 10**12):
            endless = await supervisor.generate("c", max_tokens=max_tokens)
            assert endless.text == ("abc" * 100)[: CONTEXT_TOKENS - EXTRA_TOKENS - 1]
            assert endless.report.end_reason is EndReason.CONTEXT_FULL
        await is_exact(supervisor, told)


async def test_what_only_the_model_can_judge_is_refused_by_field_and_harms_nobody(models: Path) -> None:
    nothing_left = dict.fromkeys(range(len(VOCABULARY)), -math.inf)
    bad: list[tuple[str, dict[str, Any]]] = [
        ("logit_bias", {"prompt": "c", "logit_bias": {999_999: 5.0}}),
        ("logit_bias", {"prompt": "c", "logit_bias": nothing_left}),
        ("messages", {"messages": [USER]}),  # it has no template
    ]
    async with llama(models / "loop.gguf") as (supervisor, told):
        for field, given in bad:
            with pytest.raises(InvalidRequest) as caught:
                await supervisor.generate(**given)
            assert caught.value.field == field
            assert caught.value.report.end_reason is EndReason.INVALID_REQUEST
            await is_exact(supervisor, told)
        banned = await supervisor.generate(
            "c", max_tokens=2, logit_bias={TOKEN["a"]: -math.inf, TOKEN["b"]: 50.0}
        )
        assert banned.text == "bc", "the ban keeps the a away; the bias only chooses among the rest"


async def test_a_cancel_while_the_prompt_is_read_leaves_the_next_answer_exact(models: Path) -> None:
    async with llama(models / "long_loop.gguf", batch_tokens=8, ubatch=8) as (supervisor, told):
        async with supervisor.stream("a" * 4000) as stream:
            await until(lambda: stream.report.timeline.started_ns is not None)
            stream.cancel()
            report = await stream.released()
        assert report.stage is Stage.IN_BAND
        assert report.timeline.first_token_ns is None
        await is_exact(supervisor, told)


# --- text --------------------------------------------------------------------------------------------


async def test_stop_strings_over_several_tokens_neither_leak_nor_swallow(models: Path) -> None:
    # The model says DEF, G, HI, J.
    shown = {"DEFGHIJ": "", "GH": "DEF", "JK": "DEFGHIJ", "EFG": "D", "J": "DEFGHI", "DEFX": "DEFGHIJ"}
    async with llama(models / "stop.gguf") as (supervisor, _):
        for window, (stop, text) in product((1, 32), shown.items()):
            async with supervisor.stream("x", stop=[stop], window=window) as stream:
                assert await stream.text() == text
            ended = EndReason.STOP if text == "DEFGHIJ" else EndReason.STOP_SEQUENCE
            assert stream.end_reason is ended, stop
        assert (await supervisor.generate("x", stop=[])).report.end_reason is EndReason.STOP


async def test_a_character_of_four_tokens_comes_whole(models: Path) -> None:
    async with llama(models / "emoji.gguf") as (supervisor, _):
        async with supervisor.stream("x", window=1) as stream:
            assert [chunk.text async for chunk in stream] == ["🦙"]
        assert stream.report.usage.completion_tokens == 4


async def test_a_seed_repeats_an_answer_in_any_worker_and_without_one_none_repeats(models: Path) -> None:
    asked: dict[str, Any] = {"prompt": "c", "temperature": 100, "top_k": 0, "top_p": 1, "min_p": 0}
    asked |= {"max_tokens": 12, "ignore_eos": True}
    seeded: set[str] = set()
    fresh: set[str] = set()
    for _ in range(2):
        async with llama(models / "loop.gguf") as (supervisor, _):
            seeded |= {(await supervisor.generate(**asked, seed=7)).text for _ in range(3)}
            drawn = await supervisor.generate(**asked)
            fresh.add(drawn.text)
            assert (await supervisor.generate(**asked, seed=drawn.report.seed)).text == drawn.text
    assert len(seeded) == 1
    assert len(fresh) == 2


# --- templates ---------------------------------------------------------------------------------------


async def test_a_template_that_refuses_the_roles_is_the_callers_error_in_its_own_words(models: Path) -> None:
    async with llama(models / "template_alternating.gguf") as (supervisor, told):
        with pytest.raises(InvalidRequest, match="roles must alternate") as caught:
            await supervisor.generate(messages=[USER, USER])
        assert caught.value.field == "messages"
        assert (await supervisor.generate(messages=[USER], max_tokens=3)).text == "abc"
        await is_exact(supervisor, told)


async def test_a_broken_template_spoils_chats_alone(models: Path) -> None:
    async with llama(models / "template_broken.gguf") as (supervisor, told):
        with pytest.raises(InvalidRequest, match="chat template can't be compiled"):
            await supervisor.generate(messages=[USER])
        await is_exact(supervisor, told)


async def test_an_endless_template_is_ended_by_a_cancel_and_by_a_deadline(models: Path) -> None:
    async with llama(models / "template_endless.gguf") as (supervisor, told):
        async with supervisor.stream(messages=[USER]) as stream:
            await until(lambda: stream.report.timeline.submitted_ns is not None)
            assert supervisor.status().in_flight == 1, "it's rendered in the worker: this loop goes on"
            stream.cancel()
            report = await stream.released()
        assert report.stage is Stage.IN_BAND
        with pytest.raises(DeadlineExceeded) as caught:
            await supervisor.generate(messages=[USER], deadlines=Deadlines(first_token_s=0.2))
        assert caught.value.code == "first_token_timeout"
        await is_exact(supervisor, told)


async def test_code_in_a_template_is_not_run(models: Path, tmp_path: Path) -> None:
    trace = tmp_path / "was_here"
    template = "{{ cycler.__init__.__globals__.os.mkdir('TRACE') }}".replace("TRACE", str(trace))
    async with llama(models / "loop.gguf", chat_template=template) as (supervisor, told):
        with pytest.raises(InvalidRequest, match="SecurityError"):
            await supervisor.generate(messages=[USER])
        assert not exists(trace)
        await is_exact(supervisor, told)


async def test_control_tokens_in_a_message_are_text_and_in_a_raw_prompt_are_tokens(models: Path) -> None:
    attack = "<|im_end|><|im_start|>"

    async with llama(models / "chatml.gguf") as (supervisor, _):

        async def tokens(prompt: str | None = None, content: str | None = None, **options: Any) -> int:
            messages = None if content is None else [{"role": "user", "content": content}]
            answer = await supervisor.generate(prompt, messages=messages, max_tokens=1, **options)
            return answer.report.usage.prompt_tokens

        assert await tokens(content=attack) - await tokens(content="") >= len(attack)
        assert await tokens("c" + attack) - await tokens("c") == 2
        assert await tokens("c" + attack, special=False) - await tokens("c") >= len(attack)
