"""The console in a real browser, against the real command and real workers."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Pages
from tests.docs.markdown import ROOT
from tests.helpers.command_line import running
from tests.helpers.serving import Serving, kill, service_environment, serving

PICTURES = ROOT / "docs" / "pictures"
RELEASED = re.compile(r"stopped · released after <?\d+(\.\d+)? m?s \(in_band\)")
WORDS = " ".join(f"word{number}" for number in range(60))


@contextmanager
def console(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> Iterator[Serving]:
    """Serve the scripted engine, ready."""
    with serving("--log-level", "warning", *arguments, env=env, **options) as service:
        service.ready()
        yield service


@contextmanager
def real_console(*arguments: str) -> Iterator[Serving]:
    """Serve the real model, ready."""
    command = ("serve", "--port", "0", "--log-level", "warning", *arguments)
    with running(*command, env=service_environment()) as started:
        service = Serving(started)
        service.ready()
        yield service


def url(service: Serving) -> str:
    return f"http://127.0.0.1:{service.port}/"


def ask(page: Page, text: str) -> None:
    page.get_by_label("Your message").fill(text)
    page.get_by_label("Your message").press("Enter")


def until(condition: Callable[[], bool], within_s: float = 30) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def last(service: Serving) -> dict[str, Any]:
    entry: dict[str, Any] = service.ask("GET", "/api/requests")[1]["requests"][0]
    return entry


def until_phase(service: Serving, phase: str) -> None:
    def is_there() -> bool:
        _, told = service.ask("GET", "/api/requests")
        return any(entry["phase"] == phase for entry in told["requests"])

    until(is_there)


# --- stopping ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_stop_tells_when_the_worker_was_free(pages: Pages, phase: str) -> None:
    options = {"prefill_s": 60} if phase == "prefill" else {"pace_s": 0.02}
    with console(**options) as service, pages.open(url(service)) as page:
        stop = page.get_by_role("button", name="Stop")
        expect(stop).to_be_disabled()
        ask(page, "hi")
        until_phase(service, phase)
        if phase == "decode":
            expect(page.locator("#messages li.assistant")).to_contain_text("w3")
        stop.click()
        expect(page.locator("#messages .what")).to_have_text(RELEASED)
        expect(page.locator("#announced")).to_have_text(RELEASED)
        expect(stop).to_be_disabled()
        report = last(service)["choices"][0]["report"]
        assert (report["end_reason"], report["stage"]) == ("client_disconnected", "in_band")
        expect(page.locator("#rows tr").first).to_contain_text("client disconnected")


def test_escape_stops_and_another_question_can_follow(pages: Pages) -> None:
    with console(pace_s=0.02) as service, pages.open(url(service)) as page:
        ask(page, "hi")
        expect(page.locator("#messages li.assistant")).to_contain_text("w2")
        page.keyboard.press("Escape")
        expect(page.locator("#messages .what")).to_have_text(RELEASED)
        ask(page, "again")
        expect(page.locator("#messages li.assistant").nth(1)).to_contain_text("w2")
        page.keyboard.press("Escape")
        expect(page.locator("#messages .what").nth(1)).to_have_text(RELEASED)


@pytest.mark.real_model
def test_the_real_model_is_stopped_in_a_long_prompt_and_outlives_its_worker(pages: Pages) -> None:
    with real_console("--ctx", "4096") as service, pages.open(url(service)) as page:
        ask(page, "Read this. " + "word " * 1500)
        until_phase(service, "prefill")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#messages .what")).to_have_text(RELEASED)
        page.get_by_role("button", name="New chat").click()
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens").fill("150")
        ask(page, "Tell a long story about the sea.")
        answer = page.locator("#messages li.assistant")
        until(lambda: len(answer.inner_text()) > 60)
        (pid,) = service.worker_pids()
        kill(pid)
        told = page.locator("#messages .what")
        expect(told).to_contain_text(re.compile(r"the worker was lost \(crashed\), went on after \d"))
        expect(told).to_contain_text("150 tokens")
        assert service.worker_pids() != [pid]


def test_a_killed_worker_costs_the_answer_nothing(pages: Pages) -> None:
    with console("--standby", "1", text=WORDS, pace_s=0.03) as service, pages.open(url(service)) as page:
        until(lambda: len(service.worker_pids()) == 2)
        ask(page, "hi")
        answer = page.locator("#messages li.assistant .text")
        expect(answer).to_contain_text("word5")
        pid = last(service)["choices"][0]["report"]["worker_pid"]
        kill(pid)
        expect(page.locator("#messages .what")).to_contain_text("went on after")
        assert answer.inner_text() == WORDS
        expect(page.locator("#models")).to_contain_text("1 × crashed")


def test_a_new_chat_is_new_also_while_an_answer_runs(pages: Pages) -> None:
    with console(pace_s=0.02) as service, pages.open(url(service)) as page:
        ask(page, "first")
        expect(page.locator("#messages li.assistant")).to_contain_text("w2")
        page.get_by_role("button", name="New chat").click()
        until(lambda: bool(last(service)["finished"]))
        with page.expect_request(re.compile("chat/completions")) as asked:
            ask(page, "second")
        assert asked.value.post_data_json["messages"] == [{"role": "user", "content": "second"}]


def test_who_scrolls_up_is_not_pulled_down(pages: Pages) -> None:
    with console(text="one two three\n" * 400, pace_s=0.005) as service, pages.open(url(service)) as page:
        ask(page, "hi")
        messages = page.locator("#messages")
        until(lambda: messages.evaluate("e => e.scrollTop") > 100)
        messages.evaluate("e => { e.scrollTop = 0; }")
        before = last(service)["choices"][0]["report"]["tokens"]
        until(lambda: last(service)["choices"][0]["report"]["tokens"] > before + 100)
        assert messages.evaluate("e => e.scrollTop") == 0


def test_a_setting_that_cannot_be_sent_is_shown(pages: Pages) -> None:
    with console(text="one") as service, pages.open(url(service)) as page:
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("7")
        page.get_by_text("Settings").click()
        ask(page, "hi")
        expect(page.get_by_label("Temperature")).to_be_visible()
        assert service.ask("GET", "/api/requests")[1]["requests"] == []


# --- several -----------------------------------------------------------------------------------------


def test_two_tabs_chat_at_once_and_a_closed_one_frees_its_worker(pages: Pages) -> None:
    with console("--slots", "2", pace_s=0.02) as service:
        with pages.open(url(service)) as one:
            with pages.open(url(service)) as other:
                ask(one, "first")
                ask(other, "second")
                expect(one.locator("#messages li.assistant")).to_contain_text("w5")
                expect(other.locator("#messages li.assistant")).to_contain_text("w5")
                expect(one.locator("#rows tr")).to_have_count(2)
                expect(one.locator("#models")).to_contain_text("2 of 2")
            # The other tab is closed in mid-stream.
            until(lambda: last(service)["finished"])
            report = last(service)["choices"][0]["report"]
            assert report["end_reason"] == "client_disconnected"
            assert report["time_points_ns"]["released"] is not None
            expect(one.locator("#models")).to_contain_text("1 of 2")
            expect(one.get_by_role("button", name="Stop", exact=True)).to_be_enabled()


def test_who_is_stopped_in_the_queue_never_reached_the_worker(pages: Pages) -> None:
    with console("--slots", "1", pace_s=0.02) as service, pages.open(url(service)) as page:
        with service.stream() as events:
            events.until("w1")
            ask(page, "hi")
            until_phase(service, "queued")
            page.get_by_role("button", name="Stop", exact=True).click()
            expect(page.locator("#messages .what")).to_have_text("stopped · it never reached the worker")


def test_a_row_s_button_cancels_what_somebody_else_asked(pages: Pages) -> None:
    with console(pace_s=0.02) as service, pages.open(url(service)) as page:
        with service.stream() as events:
            events.until("w1")
            page.get_by_role("button", name=re.compile("Cancel request req-")).click()
            assert '"code":"cancelled"' in events.rest()[-1]
        expect(page.locator("#rows tr").first).to_contain_text("cancelled")
        expect(page.get_by_role("button", name=re.compile("Cancel request"))).to_be_hidden()


def test_the_bars_tell_the_phases(pages: Pages) -> None:
    with console("--slots", "1", prefill_s=0.4, pace_s=0.02) as service, pages.open(url(service)) as page:
        with service.stream() as events:
            events.until("w1")
            bar = page.locator("#rows svg")
            expect(bar.locator("rect.prefill")).to_have_count(1)
            expect(bar.locator("rect.decode")).to_have_count(1)
            expect(bar).to_have_attribute("aria-label", re.compile(r"prefill 0\.\d+ s, decode"))
            expect(page.locator("#rows tr").first).to_contain_text("decode")


def test_restart_wants_to_be_confirmed_and_recycle_keeps_streams(pages: Pages) -> None:
    with console(pace_s=0.02) as service, pages.open(url(service)) as page:
        (before,) = service.worker_pids()
        restart = page.get_by_role("button", name=re.compile("^Restart"))
        restart.click()
        expect(restart).to_have_text("Restart: sure?")
        assert service.worker_pids() == [before]
        restart.click()
        until(lambda: bool(service.worker_pids()) and before not in service.worker_pids())
        (between,) = service.worker_pids()
        ask(page, "hi")
        expect(page.locator("#messages li.assistant")).to_contain_text("w3")
        recycle = page.get_by_role("button", name=re.compile("^Replace"))
        recycle.click()
        recycle.click()
        until(lambda: len(service.worker_pids()) == 2)
        page.keyboard.press("Escape")
        expect(page.locator("#messages .what")).to_have_text(RELEASED)
        until(lambda: between not in service.worker_pids())


# --- keys, loss, errors ------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_kept_for_the_tab_alone(pages: Pages) -> None:
    pages.allowed = ("401",)
    env = service_environment(SUPERVISE_API_KEYS="sk-right")
    with console(env=env, text="one two") as service, pages.open(url(service)) as page:
        dialog = page.get_by_role("dialog")
        expect(dialog).to_be_visible()
        page.get_by_label("Key", exact=True).fill("sk-wrong")
        page.get_by_label("Key", exact=True).press("Enter")
        expect(page.locator("#key-wrong")).to_have_text("That key is not known here.")
        page.get_by_label("Key", exact=True).fill("sk-right")
        page.get_by_role("button", name="Use this key").click()
        expect(dialog).to_be_hidden()
        ask(page, "hi")
        expect(page.locator("#messages li.assistant .text")).to_have_text("one two")
        assert page.evaluate("localStorage.length") == 0
        assert "sk-right" not in page.content()


def test_a_key_that_nobody_gives_is_not_asked_for_again_and_again(pages: Pages) -> None:
    pages.allowed = ("401",)
    env = service_environment(SUPERVISE_API_KEYS="sk-right")
    with console(env=env) as service, pages.open(url(service)) as page:
        expect(page.get_by_role("dialog")).to_be_visible()
        page.get_by_label("Key", exact=True).fill("typed")
        page.keyboard.press("Escape")
        expect(page.locator("#connection")).to_have_text("connection lost, trying again")
        expect(page.get_by_role("dialog")).to_be_hidden()
        assert page.evaluate("sessionStorage.length") == 0
        ask(page, "hi")
        expect(page.get_by_role("dialog")).to_be_visible()


def test_a_service_that_hangs_is_as_good_as_gone(pages: Pages) -> None:
    with console(text="one") as service, pages.open(url(service)) as page:
        state = page.locator("#connection")
        expect(state).to_have_text("connected")
        process = service.command.process
        process.send_signal(signal.SIGSTOP)
        try:
            expect(state).to_have_text("connection lost, trying again")
        finally:
            process.send_signal(signal.SIGCONT)
        expect(state).to_have_text("connected")


def test_a_service_that_is_gone_is_said_and_one_that_is_back_is_used(pages: Pages) -> None:
    pages.allowed = ("ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET")
    with console(text="one") as service, pages.open(url(service)) as page:
        state = page.locator("#connection")
        expect(state).to_have_text("connected")
        port = str(service.port)
        assert service.end() == 0
        expect(state).to_have_text("connection lost, trying again")
        words = (
            "serve",
            "--engine",
            "scripted",
            "-o",
            'text="two"',
            "--port",
            port,
            "--log-level",
            "warning",
        )
        with running(*words, env=service_environment()) as again:
            Serving(again).ready()
            expect(state).to_have_text("connected")
            ask(page, "hi")
            expect(page.locator("#messages li.assistant .text")).to_have_text("two")


def test_what_goes_wrong_is_said_where_the_answer_would_be(pages: Pages) -> None:
    pages.allowed = ("400",)
    with (
        console(text="<b>bold</b> <img src=x onerror=alert(1)>") as service,
        pages.open(url(service)) as page,
    ):
        page.get_by_text("Settings").click()
        page.get_by_label("Priority").fill("1000")
        page.evaluate("document.getElementById('ask').noValidate = true")
        ask(page, "hi")
        expect(page.locator("#messages .what.failed")).to_contain_text("x-infervisor-priority")
        page.get_by_label("Priority").fill("1")
        ask(page, "hi")
        # Shown as it was said, and never run.
        said = page.locator("#messages li.assistant .text").last
        expect(said).to_have_text("<b>bold</b> <img src=x onerror=alert(1)>")
        assert page.locator("#messages img").count() == 0


# --- for everybody -----------------------------------------------------------------------------------


def test_the_keyboard_is_enough(pages: Pages) -> None:
    with console(pace_s=0.02) as service, pages.open(url(service)) as page:
        expect(page.locator("#models h3")).to_be_visible()
        page.keyboard.press("Tab")
        expect(page.get_by_text("Skip to the prompt")).to_be_focused()
        page.keyboard.press("Enter")
        reached = []
        expect(page.locator("#prompt")).to_be_focused()
        page.keyboard.type("hi")
        page.keyboard.press("Enter")
        expect(page.locator("#messages li.assistant")).to_contain_text("w2")
        for _ in range(12):
            page.keyboard.press("Tab")
            reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
            if reached[-1] == "stop":
                break
        assert reached[-1] == "stop", reached
        page.keyboard.press("Enter")
        expect(page.locator("#messages .what")).to_have_text(RELEASED)
        # Where one would type the next question.
        expect(page.locator("#prompt")).to_be_focused()


NAMELESS = """
() => [...document.querySelectorAll('button, input, select, textarea, a, summary, [role=region]')]
  .filter((e) => e.offsetParent !== null)
  .filter((e) => !(e.textContent.trim() || e.getAttribute('aria-label') || e.getAttribute('aria-labelledby')
    || (e.labels && e.labels.length && [...e.labels].some((l) => l.textContent.trim()))))
  .map((e) => e.outerHTML)
"""
CONTRAST = """
() => {
  const canvas = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
  const rgb = (color) => {
    canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = color; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => {
    const part = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const behind = (e) => {
    for (; e; e = e.parentElement) {
      const color = rgb(getComputedStyle(e).backgroundColor);
      if (color[3] > 250) return color;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const e of document.querySelectorAll('h1,h2,h3,p,label,button,select,input,textarea,li,dt,dd,th,td,summary,.what,.state')) {
    if (e.offsetParent === null || e.disabled || !e.textContent.trim()) continue;
    const a = light(rgb(getComputedStyle(e).color)), b = light(behind(e));
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) bad.push(`${e.tagName} ${e.className} ${e.textContent.trim().slice(0, 30)}: ${contrast.toFixed(2)}`);
  }
  return bad;
}
"""  # noqa: E501


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_a_name_and_can_be_read(pages: Pages, scheme: Any) -> None:
    with console(text="one two", pace_s=0.02) as service:
        with pages.open(url(service), color_scheme=scheme) as page:
            ask(page, "hi")
            expect(page.locator("#messages .what")).to_contain_text("tokens")
            expect(page.locator("#rows tr")).to_have_count(1)
            assert page.evaluate(NAMELESS) == []
            assert page.evaluate(CONTRAST) == []
            # What a screen reader hears of an answer, once.
            expect(page.locator("#announced")).to_have_text("Answer: one two")
            assert page.locator("main").count() == page.locator("h1").count() == 1
            table = page.get_by_role("table", name=re.compile("newest first"))
            assert table.get_by_role("columnheader").count() == 8


@pytest.mark.parametrize("width", [360, 390, 768])
def test_a_narrow_screen_needs_no_scrolling_sideways(pages: Pages, width: int) -> None:
    with console(text="one " * 80) as service, pages.open(url(service)) as page:
        page.set_viewport_size({"width": width, "height": 800})
        ask(page, "x" * 200)
        expect(page.locator("#messages .what")).to_contain_text("tokens")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        for button in page.locator("button:visible").all():
            box = button.bounding_box()
            assert box is not None
            assert box["height"] >= 30
            assert box["x"] + box["width"] <= width


def test_nothing_is_asked_while_nobody_looks(pages: Pages) -> None:
    with console(text="one") as service, pages.open(url(service)) as page:
        expect(page.locator("#models h3")).to_be_visible()
        page.evaluate(
            "Object.defineProperty(document, 'hidden', { value: true, configurable: true });"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        asked: list[str] = []
        page.wait_for_timeout(700)
        page.on("request", lambda request: asked.append(request.url))
        page.wait_for_timeout(1500)
        assert asked == []
        page.evaluate(
            "Object.defineProperty(document, 'hidden', { value: false, configurable: true });"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        with page.expect_request(re.compile("api/worker")):
            pass


# --- pictures ----------------------------------------------------------------------------------------


@pytest.mark.real_model
@pytest.mark.skipif(not os.environ.get("INFERVISOR_PICTURES"), reason="makes the pictures of the documents")
def test_the_pictures_of_the_documents(pages: Pages) -> None:
    with real_console("--ctx", "4096", "--slots", "2") as service, pages.open(url(service)) as page:
        page.get_by_text("Settings").click()
        page.get_by_label("Temperature").fill("0")
        page.get_by_label("Most tokens").fill("90")
        page.get_by_text("Settings").click()
        page.get_by_role("button", name="New chat").click()
        ask(page, "Name three colours and say what each of them is good for.")
        expect(page.locator("#messages .what")).to_contain_text("tokens")
        ask(page, "Tell me a long story about the sea.")
        until(lambda: len(page.locator("#messages li.assistant .text").last.inner_text()) > 40)
        page.get_by_role("button", name="Stop").click()
        expect(page.locator("#messages .what").last).to_have_text(RELEASED)
        long = [{"role": "user", "content": "Tell a story. " + "word " * 900}]
        with service.stream(max_tokens=300), service.stream(max_tokens=300), service.stream(messages=long):
            until_phase(service, "decode")
            page.wait_for_timeout(1500)
            page.set_viewport_size({"width": 1280, "height": 1060})
            page.locator("#messages").evaluate("e => { e.scrollTop = e.scrollHeight; }")
            _picture(page, "light")
            page.emulate_media(color_scheme="dark")
            _picture(page, "dark")
        page.set_viewport_size({"width": 390, "height": 844})
        page.locator("#messages").evaluate("e => { e.scrollTop = e.scrollHeight; }")
        _picture(page, "phone", full_page=True)


def _picture(page: Page, name: str, *, full_page: bool = False) -> None:
    page.wait_for_timeout(300)
    path: Path = PICTURES / f"console-{name}.png"
    page.screenshot(path=path, full_page=full_page)
