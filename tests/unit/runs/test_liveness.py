from usage_records import engine_session

from peagle.runs.liveness import Heartbeats, live_sessions, loaded_engines, tokens_per_s


def make_session(name="s", *, started_at=100.0, busy_s=8.0, ended=False, **values):
    return engine_session(name, started_at=started_at, load_s=2.0, busy_s=busy_s, ended=ended, **values)


def test_speed_is_known_once_an_engine_runs():
    loading, working = make_session(busy_s=0.0), make_session(num_output_tokens=800)
    assert (loaded_engines([loading]), tokens_per_s([loading])) == ([], None)
    assert loaded_engines([loading, working]) == [working]
    assert tokens_per_s([loading, working, working]) == 200


def test_seen_alive_returns_the_latest_recent_session_per_engine():
    killed, restarted = make_session("killed"), make_session("restarted", started_at=105.0)
    silent = make_session("silent", engine_index=1, started_at=50.0)
    ended = make_session("ended", engine_index=2, ended=True)
    sessions = [restarted, killed, silent, ended]
    assert live_sessions(sessions, since=0.0, silent_after_s=60.0) == [silent, restarted]
    assert live_sessions(sessions, since=0.0, silent_after_s=50.0) == [restarted]
    assert live_sessions(sessions, since=200.0, silent_after_s=60.0) == []


def test_engine_is_dead_after_two_missed_heartbeats(clock):
    heartbeats = Heartbeats(["earlier"], heartbeat_s=4.0, monotonic=clock)  # `earlier` is of an earlier attempt
    sessions = [make_session("earlier"), make_session("current"), make_session("ended", ended=True)]
    heartbeats.observe(sessions)
    clock.now += 8
    assert [session.session_id for session in heartbeats.alive(sessions)] == ["current"]
    assert heartbeats.lifetime_s(sessions[1]) == 18
    clock.now += 0.5
    assert heartbeats.alive(sessions) == []
    assert heartbeats.lifetime_s(sessions[1]) == 18
    sessions[1] = make_session("current", busy_s=16.0)
    heartbeats.observe(sessions)
    assert [session.session_id for session in heartbeats.alive(sessions)] == ["current"]
