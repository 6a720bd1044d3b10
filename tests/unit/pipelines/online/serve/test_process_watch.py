from pipelines.online.serve.process_watch import ProcessWatch


def test_crash_and_return_are_reported():
    processes, messages, now = {("a", 1): "controller", ("b", 2): "proxy"}, [], [0.0]
    watch = ProcessWatch(lambda: processes, messages.append, lambda: now[0])
    watch.check()
    assert messages == []
    del processes["b", 2]
    watch.check()
    (line,) = messages
    assert line.startswith("Serve's proxy died: its connections were cut")
    now[0] = 11.0
    processes["c", 3] = "proxy"
    watch.check()
    assert messages[1:] == ["Serve's proxy is back after 11 s"]
    del processes["a", 1]
    processes["a", 9] = "controller"  # Ray restarts it between two polls
    watch.check()
    assert [line.partition(":")[0] for line in messages[2:]] == [
        "Serve's controller died",
        "Serve's controller is back after 0 s",
    ]


def test_missing_part_is_reported_once():
    processes, messages, now = {("b", 2): "proxy"}, [], [0.0]
    watch = ProcessWatch(lambda: processes, messages.append, lambda: now[0])
    processes.clear()
    for now[0] in (1.0, 30.0, 61.0, 90.0):
        watch.check()
    assert len(messages) == 2
    assert "is not back after 60 s: stop this command and start it again" in messages[1]
