"""Clients of the field beside OpenAI's own: Hugging Face's, and plain fetch of another language."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import anyio.to_thread
import pytest
from huggingface_hub import InferenceClient

from infervisor import EndReason
from infervisor.supervisor.events import RequestReleased
from tests.helpers.openai_service import HI, KEY, saying, table_model

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    """uvicorn runs on asyncio alone."""
    return "asyncio"


async def test_the_client_of_hugging_face(tmp_path: Path) -> None:
    async with table_model(tmp_path) as service:

        def ask() -> tuple[str | None, str]:
            with InferenceClient(base_url=service.url, api_key=KEY) as client:
                whole = client.chat_completion(HI, model="m", temperature=0.0, max_tokens=10)
                pieces = client.chat_completion(HI, model="m", temperature=0.0, stream=True)
                text = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
                return whole.choices[0].message.content, text

        assert await anyio.to_thread.run_sync(ask) == ("hi", "hi")


FETCH = """
const [url, leave] = process.argv.slice(1);
const abort = new AbortController();
const answer = await fetch(`${url}/chat/completions`, {
  method: "POST", signal: abort.signal, headers: { "Content-Type": "application/json" },
  body: JSON.stringify({ messages: [{ role: "user", content: "hi" }], stream: true }),
});
let text = "";
try {
  for await (const part of answer.body.pipeThrough(new TextDecoderStream())) {
    text += part;
    if (leave && text.includes("w3")) abort.abort();
  }
} catch (error) {
  if (error.name !== "AbortError") throw error;
}
console.log(JSON.stringify(text));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
async def test_fetch_of_a_browser_s_language() -> None:
    def run(*arguments: str) -> str:
        command = ["node", "--input-type=module", "-e", FETCH, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        told: str = json.loads(done.stdout)
        return told

    async with saying({"text": "one two"}) as (service, _):
        text = await anyio.to_thread.run_sync(run, service.url)
        assert text.endswith("data: [DONE]\n\n")
        assert '"content":" two"' in text
    async with saying({"pace_s": 0.005}) as (service, told):
        await anyio.to_thread.run_sync(run, service.url, "leave")
        event = await told.wait_for(RequestReleased)
        assert event.report.end_reason is EndReason.CLIENT_DISCONNECTED
