"""What parent and worker agree on. Pure: no I/O, no clock, no threads, no event loop.

| module | what it holds |
|---|---|
| `messages` | every message and its field checks |
| `codec` | bytes ↔ messages, size limits |
| `credit` | how far the worker may compute ahead of the reader |
| `generation` | sampling and limits of a request, with their ranges |
| `endings` | why a request ended |
| `timeline` | time points of a request and the figures that follow |
| `deadlines` | budgets as clocks |
| `ladder` | how a cancel escalates |
| `machines` | the four life cycles as tables: request, attempt, process, slot |
| `errors` | every error of the project |
| `quoting` | foreign values in messages: briefly and safely |
"""
