"""The llama.cpp engine: GGUF models through llama-cpp-python's low-level API.

`engine.py` holds the class; every other file is one idea that it puts together. Nothing here imports
`llama_cpp` before `load()` asks for it.
"""
