"""The command `supervise run`: its flags, and how they become settings. Nothing is started before all are read."""

from __future__ import annotations

import typer

from infervisor import OnCrash
from infervisor.supervisor.cli import answer_arguments, arguments, flags
from infervisor.supervisor.cli.exit_codes import exit_with

MAX_STREAMS = 8


def run(
    context: typer.Context,
    words: flags.Words = None,
    model: flags.Model = None,
    prompt: flags.Prompt = None,
    prompts: flags.Prompts = None,
    n: flags.Answers = 1,
    system: flags.System = None,
    raw: flags.Raw = False,
    max_tokens: flags.MaxTokens = None,
    temperature: flags.Temperature = 0.8,
    top_k: flags.TopK = 40,
    top_p: flags.TopP = 0.95,
    min_p: flags.MinP = 0.05,
    logit_bias: flags.LogitBias = None,
    seed: flags.Seed = None,
    stop: flags.Stop = None,
    grammar: flags.Grammar = None,
    json_schema: flags.JsonSchema = None,
    response_format: flags.Format = flags.ResponseFormat.TEXT,
    tools: flags.Tools = None,
    tool_choice: flags.ToolChoice = None,
    logprobs: flags.Logprobs = False,
    top_logprobs: flags.TopLogprobs = 0,
    priority: flags.Priority = 0,
    window: flags.Window = 32,
    queue_timeout: flags.QueueTimeout = "none",
    startup_timeout: flags.StartupTimeout = "120",
    first_token_timeout: flags.FirstTokenTimeout = "none",
    stall_timeout: flags.StallTimeout = "none",
    total_timeout: flags.TotalTimeout = "none",
    consumer_timeout: flags.ConsumerTimeout = "none",
    on_crash: flags.Crash = OnCrash.RESUME,
    standby: flags.Standby = 0,
    slots: flags.Slots = None,
    step_budget_ms: flags.StepBudget = None,
    no_prefix_reuse: flags.NoPrefixReuse = False,
    ctx: flags.Ctx = None,
    threads: flags.Threads = None,
    gpu_layers: flags.GpuLayers = None,
    lora: flags.Lora = None,
    option: flags.Option = None,
    engine: flags.Engine = "llama",
    python: flags.Python = None,
    json: flags.Json = False,
    quiet: flags.Quiet = False,
    verbose: flags.Verbose = False,
) -> None:
    """Answer a prompt: tokens to standard output as they come, one report line to standard error.

    Several prompts, or several answers to one (--n), are shown side by side on a terminal, and otherwise one whole
    answer after the other. Ctrl-C cancels, a second one kills the worker, a third one leaves at once. A deadline of
    0 or none is no limit, and no limit is the default where none is shown.
    """
    if raw and system is not None:
        raise typer.BadParameter("--system needs the chat template, which --raw leaves out")
    if raw and tools is not None:
        raise typer.BadParameter("--tools needs the chat template, which --raw leaves out")
    options = arguments.llama_options(
        engine, ctx, threads, gpu_layers, lora=lora or (), prefix_reuse=not no_prefix_reuse
    ) | arguments.engine_options(option or ())
    generation = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "logit_bias": answer_arguments.logit_bias(logit_bias or ()),
        "seed": seed,
        "stop": [arguments.text_of(text, "a stop string") for text in stop or ()],
        "priority": priority,
        "logprobs": logprobs or top_logprobs != 0,
        "top_logprobs": top_logprobs,
        **answer_arguments.form(
            grammar=grammar,
            json_schema=json_schema,
            wants_json=response_format is flags.ResponseFormat.JSON,
            tools=tools,
            tool_choice=tool_choice,
        ),
    }
    system = None if system is None else arguments.text_of(system, "the system message")
    if prompt or prompts is not None:
        model_word = arguments.model_beside_prompts(words or (), model)
        path = arguments.model_path(model_word, engine)
        asked = arguments.prompts_of(prompt or (), prompts, has_input=context.obj, most=MAX_STREAMS)
    else:
        model_word, prompt_word = arguments.model_and_prompt(words or (), model)
        path = arguments.model_path(model_word, engine)
        unnamed = model_word if model is None else None
        asked = [arguments.prompt_of(prompt_word, model=unnamed, has_input=context.obj, raw=raw)]
    if n > 1 and len(asked) > 1:
        raise typer.BadParameter(
            f"--n is for one prompt, and there are {len(asked)}: leave one of the two out"
        )
    count = n * len(asked)
    if slots is None and count > 1 and "slots" not in options:
        slots = count

    from infervisor import Deadlines
    from infervisor.supervisor.cli import run as running

    deadlines = Deadlines(
        **{
            f"{name}_s": arguments.seconds_or_none(f"--{name.replace('_', '-')}-timeout", text)
            for name, text in (
                ("queue", queue_timeout),
                ("startup", startup_timeout),
                ("first_token", first_token_timeout),
                ("stall", stall_timeout),
                ("total", total_timeout),
                ("consumer", consumer_timeout),
            )
        }
    )
    settings = running.RunSettings(
        model=path,
        prompts=asked,
        answers=n,
        system=system,
        raw=raw,
        engine=engine,
        options=options,
        generation=generation,
        window=window,
        deadlines=deadlines,
        python=python,
        on_crash=on_crash.value,
        standby=standby,
        slots=slots,
        step_budget_s=None if step_budget_ms is None else step_budget_ms / 1000,
        json=json,
        quiet=quiet,
        verbose=verbose,
    )
    exit_with(lambda: running.run(settings))
