"""The four life cycles as tables: request, attempt, process, slot."""
