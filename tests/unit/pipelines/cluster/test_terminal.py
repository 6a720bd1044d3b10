"""Ray's processes and output, separated from the terminal of a command."""

import inspect
import subprocess
import sys
import threading

from pipelines.cluster.terminal import new_process_groups


def test_ray_processes_get_their_own_group():
    def group_of_a_child():
        command = [sys.executable, "-c", "import os; print(os.getpgid(0) == os.getpid())"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=lambda: None)
        return done.stdout.strip()

    def in_another_thread(seen):
        seen.append(group_of_a_child())

    seen = []
    with new_process_groups():
        thread = threading.Thread(target=in_another_thread, args=[seen])
        thread.start()
        thread.join()
        assert [group_of_a_child(), *seen] == ["True", "False"]
    assert group_of_a_child() == "False"


def test_ray_starts_processes_by_fork_in_our_group():
    """If the first part fails, `new_process_groups` can be removed; if the second fails, it has no effect."""
    from ray._private.services import start_ray_process

    source = inspect.getsource(start_ray_process)
    assert "start_new_session" not in source
    assert "setsid" not in source
    assert "preexec_fn=preexec_fn if" in source


def test_ray_prints_to_standard_error():
    """Ray prints to standard output by default. The patch is permanent, so the test uses a separate process."""
    code = """if True:
        from ray._private import worker
        from pipelines.cluster.terminal import send_ray_messages_to_stderr

        def say(what):
            line = {"lines": [what], "pid": "raylet", "is_err": False}  # as in Ray's `print_error_messages`
            worker.print_to_stdstream(line, ignore_prefix=False)

        say("left alone")
        for _ in range(2):
            send_ray_messages_to_stderr()
        say("kept off")
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ("left alone" in done.stdout, "left alone" in done.stderr) == (True, False)
    assert ("kept off" in done.stdout, "kept off" in done.stderr) == (False, True)
