"""A web application with a thread for each request: answers as server-sent events, one supervisor for all threads.

A client that goes away cancels its request, also while the model still reads the prompt: until a chunk comes, a
comment is sent now and then, and sending to nobody fails.

Needs Flask besides (`pip install flask`). Serves on this machine only.

    python examples/flask_app.py                       # the small model of the demo extra
    python examples/flask_app.py --engine scripted     # no model: the words are counted
    curl -N 'http://127.0.0.1:8080/answer?q=What+is+a+pipe'
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterator

from flask import Flask, Response, request
from werkzeug.serving import make_server

from infervisor import (
    AdmissionError,
    BlockingStream,
    BlockingSupervisor,
    Deadlines,
    EndReason,
    InfervisorError,
    InvalidRequest,
    default_model,
)

COMMENT_EVERY_S = 0.5


def make_app(supervisor: BlockingSupervisor) -> Flask:
    """Return the application. All its threads share the supervisor."""
    app = Flask(__name__)

    @app.get("/answer")
    def answer() -> Response:
        question = [{"role": "user", "content": request.args.get("q", "")}]
        stream = supervisor.stream(messages=question, max_tokens=request.args.get("max_tokens", 200, int))
        # Into the queue before the first byte: a refusal can still be a status code.
        stream.__enter__()
        return Response(events(stream), mimetype="text/event-stream")

    @app.get("/status")
    def status() -> dict[str, object]:
        now = supervisor.status()
        return {"worker": now.worker, "in_flight": now.in_flight, "waiting": now.queue_depth}

    @app.errorhandler(InfervisorError)
    def refused(error: InfervisorError) -> tuple[dict[str, object], int]:
        code = 400 if isinstance(error, InvalidRequest) else 503 if isinstance(error, AdmissionError) else 500
        return {"code": error.code, "message": str(error), "retryable": error.retryable}, code

    return app


def events(stream: BlockingStream) -> Iterator[str]:
    """Yield the answer as events. The server closes this generator when it can't send any more."""
    try:
        with stream:
            try:
                while True:
                    try:
                        chunk = stream.read(timeout=COMMENT_EVERY_S)
                    except TimeoutError:
                        yield ": waiting\n\n"
                        continue
                    if chunk is None:
                        break
                    yield f"data: {json.dumps({'text': chunk.text})}\n\n"
            except GeneratorExit:
                stream.cancel(EndReason.CLIENT_DISCONNECTED)
                raise
            except InfervisorError as error:
                yield f"event: error\ndata: {json.dumps({'code': error.code, 'message': str(error)})}\n\n"
        yield f"event: end\ndata: {json.dumps({'reason': stream.end_reason})}\n\n"
    finally:
        print(stream.report.to_line(), flush=True)


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description="Embed a model in a web application.")
    parser.add_argument("--engine", default="llama", choices=("llama", "scripted"))
    parser.add_argument("--port", type=int, default=8080)
    arguments = parser.parse_args()
    model = default_model() if arguments.engine == "llama" else None
    options = {} if arguments.engine == "llama" else {"pace_s": 0.01, "prefill_tokens_per_s": 50}
    deadlines = Deadlines(queue_s=60, total_s=300)
    with BlockingSupervisor(
        model, engine=arguments.engine, options=options, max_queue=8, deadlines=deadlines
    ) as supervisor:
        server = make_server("127.0.0.1", arguments.port, make_app(supervisor), threaded=True)
        print(f"http://127.0.0.1:{server.server_port}/", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
        server.server_close()


if __name__ == "__main__":
    main()
