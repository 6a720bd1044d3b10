"""Make usage records for tests."""

from peagle.economics.usage import EngineSession, UnitUsage
from peagle.speculation import SpeculationStats


def drafts(num_drafts, *accepted):
    """Return statistics of drafts of equal length. `accepted` has the number of accepted tokens by position."""
    return SpeculationStats(
        num_drafts=num_drafts, num_draft_tokens=num_drafts * len(accepted), accepted_per_position=accepted
    )


def engine_session(session_id="s", *, started_at=0.0, load_s=0.0, compile_s=0.0, busy_s=0.0, idle_s=0.0, **values):
    """Return an ended session whose duration is the sum of these seconds."""
    defaults = {
        "engine_index": 0,
        "hostname": "h",
        "num_devices": 1,
        "device": "vcpu",
        "last_seen_at": started_at + load_s + compile_s + busy_s + idle_s,
        "num_output_tokens": 0,
        "ended": True,
    }
    times = {"started_at": started_at, "load_s": load_s, "compile_s": compile_s, "busy_s": busy_s, "idle_s": idle_s}
    return EngineSession(session_id=session_id, **(defaults | times | values))


def unit_usage(session_id="s", **values):
    defaults = {
        "num_rows": 1,
        "num_failed_rows": 0,
        "num_prompt_tokens": 0,
        "num_cached_tokens": 0,
        "num_output_tokens": 0,
        "busy_s": 1.0,
        "speculation": SpeculationStats.empty(),
        "started_at": 1.0,
        "finished_at": 2.0,
    }
    return UnitUsage(session_id=session_id, **(defaults | values))
