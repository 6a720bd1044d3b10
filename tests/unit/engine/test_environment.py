import importlib
import sys
from dataclasses import replace
from pathlib import Path

import devices
import pytest

from peagle.engine import vllm_plugin
from peagle.engine.environment import environment, find_preload_libraries, set_environment
from peagle.engine.spec import DrafterSpec, EngineSpec
from peagle.engine.vllm_drafts import LOOKUP, VERIFY
from peagle.errors import CapacityError, ConfigError

SPEC = EngineSpec(model="org/m")
VENV_BIN = str(Path(sys.executable).parent)


def cpu(*cores, quota=None):
    return devices.cpu(num_cpus=quota or len(cores), core_ids=cores, is_cpu_quota=quota is not None)


GPU = devices.gpu()


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    """Make tcmalloc and Intel's OpenMP appear installed; return their paths."""
    paths = {"libtcmalloc": Path("/lib/libtcmalloc_minimal.so.4"), "libiomp5": Path("/env/libiomp5.so")}
    # `peagle.engine.environment` as an attribute is the function of that name, not the module.
    module = importlib.import_module("peagle.engine.environment")
    monkeypatch.setattr(module, "find_preload_libraries", lambda: paths)
    monkeypatch.setattr(module, "cache_root", lambda inherited: {"VLLM_CACHE_ROOT": "/cache"})
    return paths


def test_variables_on_a_gpu():
    assert environment(SPEC, GPU, inherited={"PATH": f"/usr/bin:{VENV_BIN}"}) == {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "VLLM_XGRAMMAR_CACHE_MB": "64",
        LOOKUP: "",
        VERIFY: "",
    }


def test_ninja_is_found_without_activation():
    assert environment(SPEC, GPU, inherited={"PATH": "/usr/bin"})["PATH"] == f"/usr/bin:{VENV_BIN}"
    assert environment(SPEC, GPU, inherited={})["PATH"] == VENV_BIN


def test_lookup_variable_is_always_set():
    head = DrafterSpec(method="peagle", model="org/head", num_speculative_tokens=3, lookup=True)
    values = [
        environment(EngineSpec(model="org/m", drafter=drafter), GPU, inherited={})[LOOKUP]
        for drafter in (head, replace(head, method="eagle3"), replace(head, lookup=False), None)
    ]
    assert values == ["2", "5", "", ""]


def test_media_and_grammar_variables_of_the_user_are_kept():
    from vllm import envs

    assert {"VLLM_MEDIA_URL_ALLOW_REDIRECTS", "VLLM_XGRAMMAR_CACHE_MB"} <= envs.environment_variables.keys()
    user_variables = {"VLLM_MEDIA_URL_ALLOW_REDIRECTS": "1", "VLLM_XGRAMMAR_CACHE_MB": "512"}
    assert not user_variables.keys() & environment(SPEC, GPU, inherited=user_variables).keys()


@pytest.mark.parametrize(
    ("inherited_plugins", "expected"), [("", "peagle"), ("other", "other,peagle"), ("peagle,other", None), (None, None)]
)
def test_peagle_plugin_is_always_loaded(inherited_plugins, expected):
    inherited = {} if inherited_plugins is None else {"VLLM_PLUGINS": inherited_plugins}
    assert environment(SPEC, GPU, inherited=inherited).get("VLLM_PLUGINS") == expected


def test_local_models_are_offline(tmp_path):
    local, hub = EngineSpec(model=str(tmp_path)), EngineSpec(model="org/m")
    head = DrafterSpec(method="peagle", model="org/head", num_speculative_tokens=3)
    mixed = EngineSpec(model=str(tmp_path), drafter=head)
    ngram = DrafterSpec(method="ngram", model="", num_speculative_tokens=3)
    without_head = EngineSpec(model=str(tmp_path), drafter=ngram)
    offline = ["HF_HUB_OFFLINE" in environment(spec, GPU, inherited={}) for spec in (local, hub, mixed, without_head)]
    assert offline == [True, False, False, True]


@pytest.mark.parametrize(
    ("num_cores", "num_engines", "tensor_parallel_size", "inherited", "bindings"),
    [
        (2, 1, 1, "", ["0,1"]),
        (2, 1, 1, "", ["0,1", "0,1"]),  # an additional engine, restarted here after a node was lost, shares cores
        (5, 2, 1, "", ["0,1", "2,3,4"]),
        (8, 2, 2, "", ["0,1|2,3", "4,5|6,7"]),
        (2, 1, 1, "1", ["1"]),  # only a single engine keeps the user's binding
        (2, 2, 1, "1", ["0", "1"]),
    ],
)
def test_engines_of_a_node_divide_the_cores(num_cores, num_engines, tensor_parallel_size, inherited, bindings):
    spec, name = replace(SPEC, tensor_parallel_size=tensor_parallel_size), "VLLM_CPU_OMP_THREADS_BIND"
    for index, binding in enumerate(bindings):
        variables = environment(
            spec,
            cpu(*range(num_cores)),
            engine_index=index,
            num_engines_on_node=num_engines,
            inherited={name: inherited} if inherited else {},
        )
        assert variables[name] == binding


def test_cpu_engine_has_a_compile_cache():
    assert environment(SPEC, cpu(0), inherited={})["VLLM_CACHE_ROOT"] == "/cache"
    assert "VLLM_CACHE_ROOT" not in environment(SPEC, GPU, inherited={})


def test_more_engines_than_cores_are_refused():
    with pytest.raises(CapacityError, match="need 3 cores"):
        environment(SPEC, cpu(0, 1), num_engines_on_node=3, inherited={})


def test_cpu_quota_disables_binding():
    variables = environment(SPEC, cpu(*range(64), quota=4), num_engines_on_node=2, inherited={})
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert variables["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    ("inherited", "expected"),
    [
        ("", "/lib/libtcmalloc_minimal.so.4:/env/libiomp5.so"),
        ("/x/liba.so", "/x/liba.so:/lib/libtcmalloc_minimal.so.4:/env/libiomp5.so"),
        ("/x/libgomp.so.1", "/x/libgomp.so.1:/lib/libtcmalloc_minimal.so.4"),
        ("/x/libtcmalloc.so.4 /x/libiomp5.so", "/x/libtcmalloc.so.4:/x/libiomp5.so"),
    ],
    ids=["both", "kept", "no-second-openmp", "already-there"],
)
def test_existing_preload_is_kept(inherited, expected):
    assert environment(SPEC, cpu(0), inherited={"LD_PRELOAD": inherited})["LD_PRELOAD"] == expected


def test_no_preload_without_libraries(libraries):
    libraries.clear()
    assert "LD_PRELOAD" not in environment(SPEC, cpu(0), inherited={})


def test_libraries_are_found_in_the_environment(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.prefix", str(tmp_path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libiomp5.so").touch()
    (tmp_path / "lib/libtcmalloc_minimal.so.4").touch()
    assert find_preload_libraries() == {
        "libiomp5": tmp_path / "lib/libiomp5.so",
        "libtcmalloc": tmp_path / "lib/libtcmalloc_minimal.so.4",
    }


@pytest.mark.parametrize("hardware", [GPU, cpu(0, 1)])
def test_drafter_requires_the_plug_in(hardware, monkeypatch):
    monkeypatch.setattr(vllm_plugin, "entry_points", lambda group: ())
    drafter = DrafterSpec(method="eagle3", model="org/h", num_speculative_tokens=3)
    with pytest.raises(ConfigError, match="counts tokens after a stop string"):
        set_environment(replace(SPEC, drafter=drafter), hardware)
