"""What parent and worker agree on. Pure: no I/O, no clock, no threads, no event loop.

| module | what it holds |
|---|---|
| `messages` | every message: its fields and their order |
| `field_checks` | what a field may hold |
| `codec` | bytes ↔ messages, size limits |
| `arrays` | long rows of numbers as bytes |
| `credit` | how far the worker may compute ahead of the reader |
| `generation` | sampling and limits of a request, with their ranges |
| `output` | what else a request asks of its answer: probabilities, a form, tools |
| `json_schema` | whether an answer can be made to follow a schema, and the plainer schema to do it by |
| `schema_merge`, `schema_values`, `schema_pattern` | its parts: keywords, leaves, regular expressions |
| `tool_calls` | finds calls of tools in an answer as it comes |
| `json_extent` | where a JSON value in it ends |
| `endings` | why a request ended |
| `timeline` | time points of a request and the figures that follow |
| `deadlines` | budgets as clocks |
| `ladder` | how a cancel escalates |
| `blame` | who is suspected when a worker dies, and who goes next |
| `machines` | the four life cycles as tables: request, attempt, process, slot |
| `errors` | every error of the project |
| `quoting` | foreign values in messages: briefly and safely |
"""
