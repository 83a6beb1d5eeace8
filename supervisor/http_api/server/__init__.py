"""The HTTP server: sockets, connections and their limits, on uvicorn."""
