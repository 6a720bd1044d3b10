"""Try to compile grammars: `python -m peagle.engine.trial_process`.

Reads lines of JSON: first the tokenizer (as xgrammar writes it, or the model's name), then constraints. A forked child
with limits on CPU time and memory compiles each constraint.
"""

import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from peagle.engine import vllm_plugin

# Signals of a crash of the compiler, which would also crash an engine; None if the compiler ran out of memory. Other
# signals come from outside.
_CRASHES = (None, signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
_NUM_MASKS = 16  # token masks that are timed
_MAX_MASK_S = 0.01  # CPU time per token mask; every request on the engine waits for it


def main() -> None:
    """Serve until standard input is closed."""
    import xgrammar

    settings = json.loads(sys.stdin.readline())
    if "tokenizer" in settings:
        vocabulary = xgrammar.TokenizerInfo.deserialize_json(settings["tokenizer"])
    else:
        from peagle.requests.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(settings["model"], settings["revision"])
        vocabulary = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=settings["vocab_size"])
    os.nice(vllm_plugin.NICE)
    _write({"outcome": "ready"})
    for line in sys.stdin:
        _write(_compile_in_child(xgrammar, vocabulary, json.loads(line), settings))


def _compile_in_child(xgrammar: Any, vocabulary: Any, job: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Return a child's verdict on the constraint. This process has no threads, so it can fork."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.dup2(2, 1)  # keep output of libraries out of standard output
            _set_limits(settings["cpu_s"], settings["memory_bytes"])
            os.write(writable, json.dumps(_compile(xgrammar, vocabulary, job)).encode())
        except MemoryError:
            os._exit(0)  # without output, the verdict is "large"
        except BaseException:
            traceback.print_exc()
            os.write(writable, b'{"outcome": "busy"}')
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as pipe:
        output = pipe.read()
    _, status, usage = os.wait4(child, 0)
    killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    outcomes: dict[int | None, str] = {signal.SIGPROF: "slow", **dict.fromkeys(_CRASHES, "large")}
    verdict = json.loads(output) if output else {"outcome": outcomes.get(killed_by, "busy")}
    return {**verdict, "cpu_s": usage.ru_utime + usage.ru_stime}


def _set_limits(cpu_s: float, memory_bytes: int) -> None:
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, cpu_s * 20)  # in case the child hangs or gets little CPU time
    current_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (current_bytes + memory_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _compile(xgrammar: Any, vocabulary: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Compile as vLLM 0.29's `XgrammarBackend.compile_grammar` does, and time some token masks."""
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    kind, spec = job["kind"], job["spec"]
    try:
        if kind == "json":
            compiled = compiler.compile_json_schema(spec, any_whitespace=job["any_whitespace"])
        elif kind == "regex":
            compiled = compiler.compile_regex(spec)
        elif kind == "grammar":
            compiled = compiler.compile_grammar(spec)
        else:
            compiled = _compile_tags(xgrammar, compiler, spec)
    except MemoryError:
        return {"outcome": "large"}
    except Exception as error:  # xgrammar raises any type; vLLM handles or reports the error
        return {"outcome": "large" if "bad_alloc" in str(error) else "invalid"}
    mask_s = _mask_s(xgrammar, compiled, vocabulary.vocab_size)
    if mask_s is None:
        return {"outcome": "unsatisfiable"}
    return {"outcome": "ok" if mask_s <= _MAX_MASK_S else "slow_steps"}


def _compile_tags(xgrammar: Any, compiler: Any, spec: str) -> Any:
    tags = json.loads(spec)
    if "structures" not in tags:
        return compiler.compile_structural_tag(spec)
    items = [
        xgrammar.StructuralTagItem(begin=tag["begin"], schema=json.dumps(tag["schema"]), end=tag["end"])
        for tag in tags["structures"]
    ]
    return compiler.compile_structural_tag(items, tags["triggers"])


def _mask_s(xgrammar: Any, compiled: Any, vocab_size: int) -> float | None:
    """Return the mean CPU seconds of a token mask along one valid response; None if no token can start a response."""
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, vocab_size)
    started_at = time.process_time()
    for number in range(1, _NUM_MASKS + 1):
        matcher.fill_next_token_bitmask(mask, 0)
        words = mask[0].nonzero()
        if not len(words):
            if number == 1:
                return None
            break
        index = int(words[(number * 7919) % len(words)])  # another word with a valid token each time; 7919 is prime
        bits = int(mask[0][index]) & 0xFFFFFFFF
        if not matcher.accept_token(index * 32 + (bits & -bits).bit_length() - 1) or matcher.is_terminated():
            break
    return (time.process_time() - started_at) / number


def _write(verdict: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(verdict) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
