"""Grammars: what an output must look like, compiled once and kept as a mask of the tokens that may come next.

The gateway compiles one to say no early; the engine compiles it again, with the same version, to draw by it.
Torch-free.
"""
