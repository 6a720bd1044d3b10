"""What of an engine's log of its start a user is shown."""

from peagle.engine.start_log import costly_warnings

LOG = """\
WARNING 11-25 08:21:10 [importing.py:83] Triton is installed, but `triton.backends` could not be imported.
INFO 11-25 08:21:13 [scheduler.py:277] Chunked prefill is enabled, which may slow down nothing.
(Worker pid=30863) WARNING 11-25 08:22:20 [cpu_worker.py:127] libtcmalloc is not found in LD_PRELOAD. For best performance, set it
(Worker pid=30864) WARNING 11-25 08:22:21 [cpu_worker.py:127] libtcmalloc is not found in LD_PRELOAD. For best performance, set it
(Worker pid=30863) WARNING 11-25 08:22:21 [vllm.py:1924] max_num_scheduled_tokens is set to 2072. This may lead to suboptimal performance.
(Worker_TP0 pid=7) WARNING 11-25 08:22:22 [decorators.py:324] Compiling model again due to a load failure from /a/b, reason: 'f' has no 'g'
(EngineCore pid=9) WARNING 11-25 08:22:23 [kv_cache.py:9] Using KV cache scaling factor 1.0 for fp8_e4m3. It may cause accuracy issues.
peagle: this run is slow
"""  # noqa: E501


def test_what_costs_time_or_correctness_is_shown_once_and_nothing_else_is():
    assert costly_warnings(LOG) == [
        "libtcmalloc is not found in LD_PRELOAD. For best performance, set it",
        "Compiling model again due to a load failure from /a/b, reason: 'f' has no 'g'",
        "Using KV cache scaling factor 1.0 for fp8_e4m3. It may cause accuracy issues.",
    ]


def test_a_flood_is_cut():
    log = "".join(f"WARNING 11-25 08:21:10 [a.py:1] {n} is slow {'x' * 9999}\n" for n in range(99))
    assert len(costly_warnings(log)) == 10
    assert max(map(len, costly_warnings(log))) < 410
