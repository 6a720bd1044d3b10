import os
import subprocess
import sys

from peagle.quiet import QuietStderr


def test_stderr_goes_to_the_log_except_told_messages(tmp_path, capfd):
    log = tmp_path / "driver.log"
    with QuietStderr() as quiet:
        os.write(2, b"before\n")
        quiet.move_to(log)
        quiet.print_to_terminal("a message for the user")
        subprocess.run([sys.executable, "-c", "import sys; print('child', file=sys.stderr)"], check=True)
    os.write(2, b"after\n")
    assert log.read_bytes() == b"before\nchild\n"
    assert capfd.readouterr().err == "a message for the user\nafter\n"
