"""A published sweep: at concurrency 1, P-EAGLE is fastest; at 8, no speculation is fastest."""

import json

import pytest

CELLS = [
    {"method": "none", "k": 0, "concurrency": 1, "output_tokens_per_s": 40.0, "tpot_s": {"p95": 0.025}},
    {"method": "peagle", "k": 3, "concurrency": 1, "output_tokens_per_s": 50.0, "acceptance_length": 1.6,
     "tpot_s": {"p95": 0.020}, "num_responses": 10, "num_output_tokens": 1000},
    {"method": "none", "k": 0, "concurrency": 8, "output_tokens_per_s": 200.0, "tpot_s": {"p95": 0.045}},
    {"method": "peagle", "k": 3, "concurrency": 8, "output_tokens_per_s": 100.0, "acceptance_length": 1.6,
     "tpot_s": {"p95": 0.090}},
]  # fmt: skip
PRICES = """\
provider,region,instance_type,accelerator,accelerator_count,vcpus,usd_per_hour_on_demand,usd_per_hour_spot,source
own,here,box-2,BIG,2,16,4.0,1.0,test
own,there,box-2,BIG,2,16,4.0,1.5,test
own,here,box-8,BIG,8,64,14.0,,test
own,here,small-2,LITTLE,2,16,1.0,,test
own,here,cpu-2,,0,2,0.1,,test
"""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("PEAGLE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sweep(tmp_path):
    """Return a function that writes the sweep, in which an engine uses one of a machine's two accelerators."""

    def write(name="sweep.json", **changes):
        data = {
            "peagle_sweep": 1, "model": "m", "instance_type": "box-2", "devices_per_engine": 1, "source": "a blog",
            "start_s": 100.0, "cells": CELLS,
        } | changes  # fmt: skip
        (tmp_path / name).write_text(json.dumps({key: value for key, value in data.items() if value is not None}))
        return tmp_path / name

    return write


@pytest.fixture
def prices(tmp_path):
    (tmp_path / "prices.csv").write_text(PRICES)
    return tmp_path / "prices.csv"
