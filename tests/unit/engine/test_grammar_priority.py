import os
import threading
from types import SimpleNamespace

import pytest

from peagle.engine import grammar_priority


def test_grammars_are_compiled_behind_the_engines_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.structured_output import StructuredOutputManager

    class Started(StructuredOutputManager):
        def __init__(self) -> None:
            super().__init__(
                SimpleNamespace(
                    parallel_config=SimpleNamespace(distributed_executor_backend="mp"),
                    scheduler_config=SimpleNamespace(max_num_seqs=1),
                    model_config=SimpleNamespace(skip_tokenizer_init=False),
                    structured_outputs_config=SimpleNamespace(
                        reasoning_parser_plugin="", reasoning_parser="", enable_in_reasoning=False
                    ),
                )
            )

    monkeypatch.setattr("vllm.v1.structured_output.cached_tokenizer_from_config", lambda model_config: None)
    monkeypatch.setattr(StructuredOutputManager, "__init__", StructuredOutputManager.__init__)  # restored at the end
    grammar_priority.compile_behind_steps()
    grammar_priority.compile_behind_steps()

    def nice() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert Started().executor.submit(nice).result() == max(nice(), grammar_priority.NICE)
