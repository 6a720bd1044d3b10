"""Ray's processes and output, separated from the terminal of a command."""

import inspect
import subprocess
import sys
import threading

from pipelines.cluster.terminal import new_process_groups


def test_processes_started_by_this_thread_get_their_own_group():
    def group_of_a_child():
        command = [sys.executable, "-c", "import os; print(os.getpgid(0) == os.getpid())"]
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=lambda: None)
        return result.stdout.strip()

    def in_another_thread(results):
        results.append(group_of_a_child())

    results = []
    with new_process_groups():
        thread = threading.Thread(target=in_another_thread, args=[results])
        thread.start()
        thread.join()
        assert [group_of_a_child(), *results] == ["True", "False"]
    assert group_of_a_child() == "False"


def test_ray_forks_processes_in_the_group_of_the_command():
    """If the first part fails, `new_process_groups` can be removed; if the second fails, it has no effect."""
    from ray._private.services import start_ray_process

    source = inspect.getsource(start_ray_process)
    assert "start_new_session" not in source
    assert "setsid" not in source
    assert "preexec_fn=preexec_fn if" in source


def test_ray_messages_go_to_standard_error():
    """Ray prints to standard output by default. The patch is permanent, so the test uses a separate process."""
    code = """if True:
        from ray._private import worker
        from pipelines.cluster.terminal import send_ray_messages_to_stderr

        def say(text):
            line = {"lines": [text], "pid": "raylet", "is_err": False}  # as in Ray's `print_error_messages`
            worker.print_to_stdstream(line, ignore_prefix=False)

        say("before")
        for _ in range(2):
            send_ray_messages_to_stderr()
        say("after")
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("before" in result.stdout, "before" in result.stderr) == (True, False)
    assert ("after" in result.stdout, "after" in result.stderr) == (False, True)
