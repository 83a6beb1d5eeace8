"""The flags of the commands: their types, names and help. What they are turned into is said in `arguments`.

Help is ASCII, so that it looks the same in every locale. Light: the help of `supervise` loads all of it.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import typer

from infervisor import OnCrash


class ResponseFormat(enum.StrEnum):
    """What an answer may be."""

    TEXT = "text"
    JSON = "json"


class VectorFormat(enum.StrEnum):
    """How vectors are written."""

    JSON = "json"
    TSV = "tsv"


def _seconds(help_line: str) -> Any:
    return typer.Option(metavar="SECONDS", help=help_line)


# --- the model and its worker ------------------------------------------------------------------------

Engine = Annotated[str, typer.Option(help="Engine of the worker: llama, or scripted (needs no model).")]
Ctx = Annotated[int | None, typer.Option("--ctx", metavar="TOKENS", help="Context of one answer.")]
Threads = Annotated[int | None, typer.Option(metavar="N", help="Threads of the llama engine.")]
GpuLayers = Annotated[int | None, typer.Option(metavar="N", help="Layers on the GPU; -1 is all.")]
Lora = Annotated[
    list[str] | None,
    typer.Option(metavar="PATH[=SCALE]", help="An adapter, and how strongly it counts: 1. Repeatable."),
]
Option = Annotated[
    list[str] | None,
    typer.Option(
        "-o", "--option", metavar="NAME=VALUE", help="An option of the engine; a JSON value, or else text."
    ),
]
Python = Annotated[
    str | None, typer.Option(metavar="PATH", help="Interpreter for the worker, with infervisor in it.")
]
Slots = Annotated[
    int | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Answers computed side by side: as many as there are prompts or --n, or the engine's default.",
    ),
]
StepBudget = Annotated[
    float | None,
    typer.Option(
        "--step-budget-ms", metavar="MS", help="Longest step of running answers while a prompt is read."
    ),
]
NoPrefixReuse = Annotated[
    bool, typer.Option("--no-prefix-reuse", help="Read every prompt anew, also what begins alike.")
]
Crash = Annotated[
    OnCrash, typer.Option(help="When the worker dies: go on in a new one where it was, or fail.")
]
Standby = Annotated[
    int, typer.Option(min=0, max=8, metavar="N", help="Further workers, loaded, that take over at once.")
]

# --- prompts -----------------------------------------------------------------------------------------

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="MODEL|PROMPT",
        show_default=False,
        help="MODEL: a .gguf file; without it the embedded default. PROMPT: text; without it standard input. "
        "A single argument is the model if it ends in .gguf or exists as a file.",
    ),
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="PATH", help="The model; the argument is the prompt then."),
]
TextModel = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="PATH", help="The model; otherwise the embedded default."),
]
Prompt = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt",
        "-p",
        metavar="TEXT",
        help="A prompt; 2 to 8 of them are answered side by side. The argument is the model then.",
    ),
]
Prompts = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Prompts, one a line, answered side by side; - is standard input."),
]
Answers = Annotated[
    int, typer.Option("--n", min=1, max=8, metavar="N", help="So many answers to one prompt, side by side.")
]
System = Annotated[str | None, typer.Option(metavar="TEXT", help="System message of the chat.")]
Raw = Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")]

# --- the answer --------------------------------------------------------------------------------------

MaxTokens = Annotated[
    int | None, typer.Option(metavar="N", help="At most N tokens; until the context is full otherwise.")
]
Temperature = Annotated[float, typer.Option(metavar="X", help="0 is greedy; 0 to 100.")]
TopK = Annotated[int, typer.Option(metavar="N", help="0 is off.")]
TopP = Annotated[float, typer.Option(metavar="X", help="1 is off; 0 to 1.")]
MinP = Annotated[float, typer.Option(metavar="X", help="0 is off; 0 to 1.")]
LogitBias = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TOKEN=X", help="Make a token, by its id, likelier: -100 to 100, or -inf. Repeatable."
    ),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="0 to 4294967295; drawn at random otherwise.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End the answer before this text. Repeatable.")
]
Grammar = Annotated[str | None, typer.Option(metavar="FILE", help="A GBNF grammar that the answer follows.")]
JsonSchema = Annotated[
    str | None, typer.Option(metavar="FILE|JSON", help="A JSON schema that the answer follows.")
]
Format = Annotated[
    ResponseFormat, typer.Option("--response-format", help="json: the answer is an object of JSON.")
]
Tools = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Functions that the model may call, a list in JSON as OpenAI's."),
]
ToolChoice = Annotated[
    str | None,
    typer.Option(metavar="CHOICE", help="auto, none, required, or the name of the one tool to call."),
]
Logprobs = Annotated[bool, typer.Option("--logprobs", help="Tell how probable each token was.")]
TopLogprobs = Annotated[
    int, typer.Option(metavar="K", help="And the K most probable ones, 1 to 20, in its place.")
]
Priority = Annotated[int, typer.Option(metavar="N", help="Higher goes first in the queue; -100 to 100.")]
Window = Annotated[int, typer.Option(metavar="N", help="Tokens computed ahead of the output.")]

# --- deadlines ---------------------------------------------------------------------------------------

QueueTimeout = Annotated[str, _seconds("Waiting in the queue.")]
StartupTimeout = Annotated[str, _seconds("Loading without progress.")]
FirstTokenTimeout = Annotated[str, _seconds("From submit to the first token.")]
StallTimeout = Annotated[str, _seconds("Between two tokens.")]
TotalTimeout = Annotated[str, _seconds("The whole request, loading not included.")]
ConsumerTimeout = Annotated[str, _seconds("Output that takes nothing.")]

# --- what is told ------------------------------------------------------------------------------------

Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="JSON lines on standard output: progress, token, interrupted, resumed, report or error.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no notes, no report line.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Tell every event on standard error, and tracebacks.")
]

# --- texts -------------------------------------------------------------------------------------------

Texts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="TEXT", show_default=False, help="Texts; without them the lines of --file or standard input."
    ),
]
Text = Annotated[
    str | None,
    typer.Argument(metavar="TEXT", show_default=False, help="A text; without it standard input."),
]
File = Annotated[str | None, typer.Option(metavar="FILE", help="Texts, one a line; - is standard input.")]
Messages = Annotated[
    str | None, typer.Option(metavar="FILE", help="A chat: a list of messages in JSON; - is standard input.")
]
Special = Annotated[
    bool, typer.Option("--no-special", help="Take spellings of control tokens as ordinary text.")
]
NotNormalised = Annotated[
    bool, typer.Option("--no-normalise", help="Leave vectors as long as the model makes them.")
]
Vectors = Annotated[VectorFormat, typer.Option("--format", help="json: an object a line; tsv: numbers.")]
