"""Translate an EngineSpec for vLLM (arguments, environment, precision, memory), and run the engine."""
