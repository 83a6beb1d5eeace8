"""Requests to the HTTP service that are wrong, each in a way of its own: name → bytes of the connection.

Owns the list alone. Every one is to be answered with a 4xx, and none may reach a worker.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

from tests.helpers.raw_http import request

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
GOOD = {"model": "scripted", "messages": MESSAGES, "max_tokens": 3}
DEEP = 20_000


def wrong_requests() -> dict[str, bytes]:
    """Return all of them."""
    found: dict[str, bytes] = {}
    for name, raw in (*_bodies(), *_fields(), *_types(), *_heads(), *_lines(), *_framings(), *_addresses()):
        assert name not in found, name
        found[name] = raw
    return found


def post(body: bytes, *headers: bytes, path: str = CHAT) -> bytes:
    """Return a POST of JSON."""
    return request(path, body, *headers)


def _bodies() -> Iterator[tuple[str, bytes]]:
    """Yield bodies that are no JSON, or JSON of another shape."""
    good = json.dumps(GOOD)
    texts: dict[str, bytes] = {
        "empty": b"",
        "blank": b" \n\t ",
        "word": b"hello",
        "null": b"null",
        "true": b"true",
        "number": b"42",
        "string": b'"messages"',
        "list": b"[]",
        "list of the body": f"[{good}]".encode(),
        "empty object": b"{}",
        "cut off": good[:-1].encode(),
        "cut in a string": good[:30].encode(),
        "two objects": (good + good).encode(),
        "object and garbage": (good + "x").encode(),
        "single quotes": good.replace('"', "'").encode(),
        "trailing comma": (good[:-1] + ",}").encode(),
        "comment": ("/* hi */" + good).encode(),
        "no colon": b'{"messages" []}',
        "unquoted key": b"{messages: []}",
        "bare infinity": good.replace("3}", "Infinity}").encode(),
        "bare nan": good.replace("3}", "NaN}").encode(),
        "hexadecimal": good.replace("3}", "0x3}").encode(),
        "leading zero": good.replace("3}", "03}").encode(),
        "plus sign": good.replace("3}", "+3}").encode(),
        "control character in a string": good.replace("hello", "he\x01llo").encode(),
        "newline in a string": good.replace("hello", "he\nllo").encode(),
        "NUL behind": good.encode() + b"\x00",
        "NUL before": b"\x00" + good.encode(),
        "bad escape": good.replace("hello", "\\x41").encode(),
        "cut escape": good.replace("hello", "\\u12").encode(),
        "lone high surrogate": good.replace("hello", "\\ud800").encode(),
        "lone low surrogate": good.replace("hello", "\\udc00").encode(),
        "invalid UTF-8": good.encode().replace(b"hello", b"\xff\xfe"),
        "overlong UTF-8": good.encode().replace(b"hello", b"\xc0\xaf"),
        "surrogate in UTF-8": good.encode().replace(b"hello", b"\xed\xa0\x80"),
        "cut UTF-8": good.encode().replace(b"hello", b"\xe2\x82"),
        "UTF-16": good.encode("utf-16"),
        "UTF-32": good.encode("utf-32"),
        "latin-1": good.encode().replace(b"hello", b"caf\xe9"),
        "gzip undeclared": gzip.compress(good.encode()),
        "form": b"model=scripted&messages=hello",
        "XML": b"<messages/>",
        "deep lists": b"[" * DEEP,
        "deep lists closed": b"[" * DEEP + b"]" * DEEP,
        "deep objects": b'{"a":' * DEEP,
        "deep messages": b'{"messages":' + b"[" * DEEP + b"]" * DEEP + b"}",
        "huge integer": good.replace("3}", "9" * 5000 + "}").encode(),
        "integer beyond 64 bits": good.replace("3}", f"{1 << 70}" + "}").encode(),
        "huge exponent": good.replace("3}", "1e400}").encode(),
        "multipart": b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n--x--',
    }
    for name, text in texts.items():
        yield f"body: {name}", post(text)


def _fields() -> Iterator[tuple[str, bytes]]:
    """Yield well-formed JSON with one field that is wrong."""
    wrong: dict[str, list[Any]] = {
        "model": [7, True, [], {}, "no-such-model", "../../etc/passwd", "x" * 10_000, "sc\u0000ripted"],
        "messages": [None, "hello", 7, {}, [], [7], [None], ["hello"], [[]], [{}]],
        "max_tokens": ["3", 0, -2, 1.5, [], {}, True, -(1 << 63), 1 << 63],
        "max_completion_tokens": ["3", -2, 2.5, []],
        "temperature": ["hot", -0.1, [], {}, True, 1e300],
        "top_p": ["x", -1, 2, []],
        "seed": ["x", 1.5, [], {}, 1 << 80],
        "stop": [7, {}, [7], [None], [[]], [""], "", ["x"] * 1000],
        "n": ["x", 0, -1, 1.5, [], 100_000],
        "stream": ["yes", 7, [], {}],
        "stream_options": ["x", 7, [], {"include_usage": "x"}, {"unknown": True}],
        "logprobs": ["x", 7, []],
        "top_logprobs": ["x", -1, 10_000, 1.5],
        "logit_bias": ["x", [], {"a": 1}, {"1": "x"}, {"1": 1000}, {"-1": 1}],
        "presence_penalty": ["x", 99, []],
        "frequency_penalty": ["x", -99, {}],
        "response_format": [7, [], {}, {"type": "poem"}, {"type": "json_schema"},
                            {"type": "json_schema", "json_schema": {"name": "x", "schema": 7}},
                            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}],
        "tools": ["x", 7, {}, [7], [{}], [{"type": "function"}], [{"type": "function", "function": {}}],
                  [{"type": "function", "function": {"name": 7}}],
                  [{"type": "function", "function": {"name": "f", "parameters": 7}}]],
        "tool_choice": [7, [], "sometimes", {"type": "function"}, "required",
                        {"type": "function", "function": {"name": "missing"}}],
        "no_such_field": [1],
    }  # fmt: skip
    for field, values in wrong.items():
        for index, value in enumerate(values):
            yield f"field: {field} #{index}", post(json.dumps({**GOOD, field: value}).encode())
    message_wrong: list[Any] = [
        {"role": "user"},
        {"content": "x"},
        {"role": 7, "content": "x"},
        {"role": None, "content": "x"},
        {"role": "user", "content": 7},
        {"role": "user", "content": {}},
        {"role": "user", "content": [7]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "text", "text": 7}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]},
        {"role": "user", "content": [{"type": "input_audio"}]},
    ]
    for index, message in enumerate(message_wrong):
        yield f"message #{index}", post(json.dumps({**GOOD, "messages": [message]}).encode())
    for path, bodies in {
        "/v1/completions": [{}, {"prompt": None}, {"prompt": 7}, {"prompt": {}}, {"prompt": []}, {"prompt": [{}]},
                            {"prompt": "x", "max_tokens": "x"}, {"prompt": "x", "n": 0}, {"prompt": "x", "echo": 7},
                            {"prompt": "x", "messages": []}, {"prompt": ["x"] * 5000}],
        "/v1/embeddings": [{}, {"input": None}, {"input": 7}, {"input": {}}, {"input": []}, {"input": [None]},
                           {"input": "x", "encoding_format": "png"}, {"input": "x", "dimensions": "x"}],
    }.items():  # fmt: skip
        for index, body in enumerate(bodies):
            yield f"{path} #{index}", post(json.dumps({"model": "scripted", **body}).encode(), path=path)


def _types() -> Iterator[tuple[str, bytes]]:
    """Yield good bodies that say they are something else."""
    good = json.dumps(GOOD).encode()
    for content_type in (
        "text/plain", "text/html", "application/xml", "application/x-www-form-urlencoded",
        "application/octet-stream", "multipart/form-data; boundary=x", "application/jsonp",
        "application/json; charset=utf-16",
        "application/json; charset=latin-1", "application/json, application/json", "json", "*/*", "/", "",
    ):  # fmt: skip
        raw = post(good).replace(b"Type: application/json", b"Type: " + content_type.encode())
        yield f"type: {content_type!r}", raw
    yield "type: none", post(good).replace(b"Content-Type: application/json\r\n", b"")
    yield "type: twice", post(good, b"Content-Type: application/json")
    for coding, body in {
        "gzip": gzip.compress(good),
        "deflate": zlib.compress(good),
        "br": good,
        "zstd": good,
        "gzip, gzip": gzip.compress(gzip.compress(good)),
        "nonsense": good,
    }.items():
        yield f"coding: {coding}", post(body, b"Content-Encoding: " + coding.encode())


def _heads() -> Iterator[tuple[str, bytes]]:
    """Yield requests with headers that are malformed, too many, too large, or whose value is impossible."""
    good = json.dumps(GOOD).encode()
    for name, line in {
        "no colon": b"Nonsense",
        "space in the name": b"X Y: 1",
        "space before the colon": b"X-Y : 1",
        "empty name": b": 1",
        "NUL in the value": b"X-Y: a\x00b",
        "NUL in the name": b"X\x00Y: a",
        "bare CR": b"X-Y: a\rb",
        "name not ASCII": "X-Ü: 1".encode(),
        "name with a slash": b"X/Y: 1",
        "name in brackets": b"(X): 1",
        "huge": b"X-Y: " + b"a" * 100_000,
        "large": b"X-Y: " + b"a" * 40_000,
        "long name": b"X" * 40_000 + b": 1",
        "many": b"\r\n".join(b"X-%d: 1" % n for n in range(200)),
        "second host": b"Host: evil.example",
        "same host twice": b"Host: localhost",
        "expectation": b"Expect: a-miracle",
        "foreign page": b"Origin: https://evil.example",
        "no page": b"Origin: null",
        "two pages": b"Origin: http://localhost\r\nOrigin: http://localhost",
        "foreign load": b"Sec-Fetch-Site: cross-site",
        "timeout that is a word": b"X-Infervisor-Total-Timeout: soon",
        "timeout below zero": b"X-Infervisor-Queue-Timeout: -1",
        "timeout that is no number": b"X-Infervisor-Stall-Timeout: nan",
        "timeout empty": b"X-Infervisor-First-Token-Timeout: ",
        "priority": b"X-Infervisor-Priority: high",
        "on crash": b"X-Infervisor-On-Crash: panic",
        "report": b"X-Infervisor-Report: everywhere",
    }.items():
        yield f"header: {name}", post(good, line)


def _lines() -> Iterator[tuple[str, bytes]]:
    """Yield request lines that are malformed, and methods and targets that there aren't."""
    host = b"\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    for name, line in {
        "empty": b" ",
        "one word": b"GET",
        "no version": b"GET /v1/models",
        "version 2": b"GET /v1/models HTTP/2.0",
        "version 0.9": b"GET /v1/models HTTP/0.9",
        "version 9.9": b"GET /v1/models HTTP/9.9",
        "version without digits": b"GET /v1/models HTTP/x.y",
        "lower-case protocol": b"GET /v1/models http/1.1",
        "other protocol": b"GET /v1/models ICY/1.1",
        "two spaces": b"GET  /v1/models HTTP/1.1",
        "tab": b"GET\t/v1/models\tHTTP/1.1",
        "space in the target": b"GET /v1/ models HTTP/1.1",
        "NUL in the target": b"GET /v1/\x00models HTTP/1.1",
        "bytes in the target": b"GET /v1/\xff HTTP/1.1",
        "umlaut in the target": "GET /v1/ü HTTP/1.1".encode(),
        "method with a slash": b"GE/T /v1/models HTTP/1.1",
        "method with a bracket": b"GET( /v1/models HTTP/1.1",
        "trailing word": b"GET /v1/models HTTP/1.1 please",
        "leading space": b" GET /v1/models HTTP/1.1",
        "long target": b"GET /" + b"a" * 70_000 + b" HTTP/1.1",
        "long query": b"GET /v1/models?" + b"a" * 40_000 + b" HTTP/1.1",
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        "HTTP/2 preface": b"PRI * HTTP/2.0",
        "SSH": b"SSH-2.0-OpenSSH_9.9",
        "SOCKS": b"\x05\x01\x00",
        "redis": b"*1\r\n$4\r\nPING",
        "only NULs": b"\x00" * 64,
        "lower-case method": b"get /v1/models HTTP/1.1",
        "unknown method": b"BREW /v1/models HTTP/1.1",
        "connect": b"CONNECT example.com:443 HTTP/1.1",
        "trace": b"TRACE /v1/models HTTP/1.1",
        "delete": b"DELETE /v1/models HTTP/1.1",
        "put": b"PUT /v1/models HTTP/1.1",
        "patch": b"PATCH /v1/models HTTP/1.1",
        "get of chat": b"GET /v1/chat/completions HTTP/1.1",
        "options of chat": b"OPTIONS /v1/chat/completions HTTP/1.1",
        "asterisk": b"OPTIONS * HTTP/1.1",
        "get asterisk": b"GET * HTTP/1.1",
        "no slash": b"GET v1/models HTTP/1.1",
        "unknown path": b"GET /v2/models HTTP/1.1",
        "doubled slash": b"GET //v1//models HTTP/1.1",
        "dots": b"GET /../../../../etc/passwd HTTP/1.1",
        "coded dots": b"GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1",
        "coded slashes": b"GET /console/..%2f..%2f..%2fetc%2fpasswd HTTP/1.1",
        "backslashes": b"GET /console/..\\..\\app.py HTTP/1.1",
        "console dots": b"GET /console/../app.py HTTP/1.1",
        "console folder": b"GET /console/ HTTP/1.1",
        "console absolute": b"GET /console//etc/passwd HTTP/1.1",
        "coded NUL": b"GET /console/console.css%00.js HTTP/1.1",
        "bad percent": b"GET /v1/%zz HTTP/1.1",
        "coded bytes": b"GET /v1/%ff%fe HTTP/1.1",
        "semicolon": b"GET /v1/models;x=1 HTTP/1.1",
        "unknown request": b"GET /api/requests/req-unknown HTTP/1.1",
        "other scheme": b"GET ftp://localhost/v1/models HTTP/1.1",
        "absolute foreign": b"GET http://evil.example/v1/models HTTP/1.1",
        "absolute with user": b"GET http://me@localhost/v1/models HTTP/1.1",
        "absolute without host": b"GET http:///v1/models HTTP/1.1",
        "file URL": b"GET file:///etc/passwd HTTP/1.1",
    }.items():
        yield f"line: {name}", line + host


def _framings() -> Iterator[tuple[str, bytes]]:
    """Yield bodies whose end is in doubt, or that are framed in a wrong way."""
    good = json.dumps(GOOD).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(good), good)

    def head(*lines: bytes, version: bytes = b"1.1") -> bytes:
        first = b"POST /v1/chat/completions HTTP/" + version
        return b"\r\n".join(
            [
                first,
                b"Host: localhost",
                b"Content-Type: application/json",
                b"Connection: close",
                *lines,
                b"",
                b"",
            ]
        )

    length = b"Content-Length: %d" % len(good)
    te = b"Transfer-Encoding: chunked"
    yield from {
        "framing: two lengths": head(length, b"Content-Length: 1") + good,
        "framing: list of lengths": head(b"Content-Length: %d, 1" % len(good)) + good,
        "framing: length below zero": head(b"Content-Length: -1") + good,
        "framing: length with a sign": head(b"Content-Length: +%d" % len(good)) + good,
        "framing: length a word": head(b"Content-Length: many") + good,
        "framing: length in hex": head(b"Content-Length: 0x10") + good,
        "framing: length with a point": head(b"Content-Length: 10.0") + good,
        "framing: length empty": head(b"Content-Length: ") + good,
        "framing: length of thirty digits": head(b"Content-Length: " + b"9" * 30) + good,
        "framing: length beyond the limit": head(b"Content-Length: 9999999999") + good,
        "framing: length and chunks": head(length, te) + chunked,
        "framing: chunks and length": head(te, length) + chunked,
        "framing: chunks twice": head(te, te) + chunked,
        "framing: chunked, chunked": head(b"Transfer-Encoding: chunked, chunked") + chunked,
        "framing: gzip, chunked": head(b"Transfer-Encoding: gzip, chunked") + chunked,
        "framing: identity": head(b"Transfer-Encoding: identity") + good,
        "framing: chunked with a vertical tab": head(b"Transfer-Encoding: \x0bchunked") + chunked,
        "framing: nonsense coding": head(b"Transfer-Encoding: nonsense") + good,
        "framing: folded coding": head(b"Transfer-Encoding:\r\n identity") + good,
        "framing: chunk size a word": head(te) + b"many\r\n" + good,
        "framing: chunk size below zero": head(te) + b"-1\r\n" + good,
        "framing: chunk size huge": head(te) + b"f" * 30 + b"\r\n" + good,
        "framing: chunk size empty": head(te) + b"\r\n" + good,
        "framing: chunk too long": head(te) + b"2\r\nabcdef\r\n0\r\n\r\n",
        "framing: chunk without an end": head(te) + b"2\r\nab0\r\n\r\n",
        "framing: chunk with 0x": head(te) + b"0x2\r\nab\r\n0\r\n\r\n",
        "framing: chunk extension huge": head(te) + b"2;" + b"a" * 100_000 + b"\r\nab\r\n0\r\n\r\n",
        "framing: trailer malformed": head(te) + chunked[:-2] + b"non sense\r\n\r\n",
        "framing: trailer huge": head(te) + chunked[:-2] + b"X: " + b"a" * 100_000,
        "framing: no body at all": head(),
        "framing: length zero": head(b"Content-Length: 0"),
        "framing: too large in chunks": head(te) + (b"10000\r\n" + b" " * 0x10000 + b"\r\n") * 300,
    }.items()


def _addresses() -> Iterator[tuple[str, bytes]]:
    """Yield requests that address another host, or none."""
    for host in (
        "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "0.0.0.0", "10.0.0.1", "[::2]", "::1",
        "[::1", "user@localhost", "localhost:", "localhost:port", "localhost:70000", "local host", "localhost/x",
        "localhost,evil.example", "", "*",
    ):  # fmt: skip
        yield f"host: {host!r}", request("/v1/models").replace(b"Host: localhost", b"Host: " + host.encode())
    yield "host: none", request("/v1/models").replace(b"Host: localhost\r\n", b"")
    yield "host: none in HTTP/1.0", b"GET /v1/models HTTP/1.0\r\n\r\n"
