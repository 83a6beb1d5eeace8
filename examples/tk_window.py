"""A window with a model that never freezes: a prompt, Send, Stop, and text that streams in.

Every answer is read by a thread of its own, because reading waits; the window only looks into a queue. The queue
is short, so a window that can't keep up slows the reader down, and the reader the model.

    python examples/tk_window.py                       # the small model of the demo extra
    python examples/tk_window.py --engine scripted     # no model: the words are counted
"""

from __future__ import annotations

import argparse
import queue
import threading
import tkinter as tk
from tkinter import ttk

from infervisor import BlockingStream, BlockingSupervisor, InfervisorError, Report, default_model

LOOK_EVERY_MS = 20
READY = "ready"


class Window(tk.Tk):
    """All of it runs in Tk's thread, except `read`."""

    def __init__(self, supervisor: BlockingSupervisor) -> None:
        super().__init__()
        self.supervisor = supervisor
        self.stream: BlockingStream | None = None
        self.news: queue.Queue[BlockingStream | str | Report | InfervisorError] = queue.Queue(maxsize=16)
        self.title("infervisor")
        self.prompt = tk.StringVar(value="What is a pipe?")
        self.status = tk.StringVar(value="loading the model …")
        self.entry = ttk.Entry(self, textvariable=self.prompt, width=60)
        self.send_button = ttk.Button(self, text="Send", command=self.ask, state="disabled")
        self.stop_button = ttk.Button(self, text="Stop", command=self.stop, state="disabled")
        self.answer = tk.Text(self, width=80, height=16, wrap="word")
        self.entry.grid(row=0, column=0, sticky="ew", padx=6, pady=6)
        self.send_button.grid(row=0, column=1)
        self.stop_button.grid(row=0, column=2, padx=6)
        self.answer.grid(row=1, column=0, columnspan=3, sticky="nsew", padx=6)
        ttk.Label(self, textvariable=self.status).grid(
            row=2, column=0, columnspan=3, sticky="w", padx=6, pady=6
        )
        self.columnconfigure(0, weight=1)
        self.rowconfigure(1, weight=1)
        threading.Thread(target=self.wait_for_the_model, daemon=True).start()
        self.look()

    def wait_for_the_model(self) -> None:
        """Thread: tell the window when the user can begin, or why not."""
        try:
            self.supervisor.wait_ready()
            self.news.put(READY)
        except InfervisorError as error:
            self.news.put(error)

    def ask(self) -> None:
        """Begin an answer."""
        self.send_button["state"] = "disabled"
        self.answer.delete("1.0", "end")
        self.status.set("reading the prompt …")
        # A daemon: one that waits for a window that was closed mustn't keep the program.
        threading.Thread(target=self.read, args=(self.prompt.get(),), daemon=True).start()

    def stop(self) -> None:
        """Stop it. Returns at once; the reader tells when the worker is free."""
        if self.stream is not None:
            self.status.set("stopping …")
            self.stream.cancel()

    def read(self, prompt: str) -> None:
        """Thread: read one answer and tell the window of it."""
        try:
            with self.supervisor.stream(messages=[{"role": "user", "content": prompt}]) as stream:
                self.news.put(stream)
                for chunk in stream:
                    self.news.put(str(chunk))
            # Leaving the stream waited until the worker was free again.
            self.news.put(stream.report)
        except InfervisorError as error:
            self.news.put(error)

    def look(self) -> None:
        """Show what has come, again and again."""
        try:
            while True:
                self.show(self.news.get_nowait())
        except queue.Empty:
            self.after(LOOK_EVERY_MS, self.look)

    def show(self, news: BlockingStream | str | Report | InfervisorError) -> None:
        """Show one piece of news."""
        if news is READY:
            self.status.set(READY)
            self.send_button["state"] = "normal"
        elif isinstance(news, BlockingStream):
            self.stream = news
            self.stop_button["state"] = "normal"
        elif isinstance(news, str):
            if self.status.get().startswith("reading"):
                self.status.set("answering …")
            self.answer.insert("end", news)
            self.answer.see("end")
        else:
            self.stream = None
            self.stop_button["state"] = "disabled"
            self.send_button["state"] = "normal"
            self.status.set(sentence(news))


def sentence(end: Report | InfervisorError) -> str:
    """Return why an answer ended, for the status line."""
    if isinstance(end, InfervisorError):
        return f"{end.code}: {end}"
    release_s = end.timeline.release_s
    if end.timeline.cancel_requested_ns is None or release_s is None:
        return f"done · {end.timeline.tokens} tokens · {end.end_reason}"
    took = f"{release_s * 1000:.0f} ms" if release_s < 1 else f"{release_s:.1f} s"
    return f"stopped · released after {took} ({end.stage})"


def main() -> None:
    """Show the window at once and load the model behind it."""
    parser = argparse.ArgumentParser(description="Embed a model in a Tk application.")
    parser.add_argument("--engine", default="llama", choices=("llama", "scripted"))
    parser.add_argument("--model", help="a .gguf file; without it the small model of the demo extra")
    arguments = parser.parse_args()
    engine = arguments.engine
    model = arguments.model or (default_model() if engine == "llama" else None)
    options = {} if engine == "llama" else {"pace_s": 0.05, "prefill_tokens_per_s": 50}
    with BlockingSupervisor(model, engine=engine, options=options, wait_until_ready=False) as supervisor:
        Window(supervisor).mainloop()


if __name__ == "__main__":
    main()
