"""From an EngineSpec to vLLM: arguments, environment, precision, memory.

Pure: it starts nothing.
"""
