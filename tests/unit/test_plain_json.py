import datetime
import decimal
import json
import math
import uuid

import numpy as np
import pandas as pd
import pydantic
import pytest

from peagle.bench.config import BenchConfig, EvaluateConfig
from peagle.drafter.config import TrainConfig
from peagle.files import write_json
from peagle.plain_json import from_json, logprob_number, to_json
from peagle.planning.config import PlanConfig
from peagle.tuning.config import TuneConfig
from pipelines.batch.config import GenerateConfig
from pipelines.online.config import ServeConfig
from pipelines.online.gateway.keys import KeyRecord

NON_FINITE = [math.nan, math.inf, -math.inf]


def parse_strictly(text):
    return json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))


@pytest.mark.parametrize("number", [*NON_FINITE, np.float64("nan"), np.float32("inf")])
def test_non_finite_numbers_become_null(number, tmp_path):
    value = {"a": number, "b": [1.5, (number,)], "c": np.array([number, 1.0])}
    assert parse_strictly(to_json(value)) == {"a": None, "b": [1.5, [None]], "c": [None, 1.0]}
    write_json(tmp_path / "a.json", value)
    assert parse_strictly((tmp_path / "a.json").read_text())["a"] is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"\xff", '"/w=="'),
        (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), '"2026-01-02T00:00:00+00:00"'),
        (datetime.time(1, 2), '"01:02:00"'),
        (datetime.timedelta(days=-1, microseconds=5), '"P-1DT0H0M0.000005S"'),
        (pd.Timedelta(1, "ns"), '"P0DT0H0M0.000000001S"'),
        (decimal.Decimal("1.50"), '"1.50"'),
        (uuid.UUID(int=1), '"00000000-0000-0000-0000-000000000001"'),
        (np.int64(3), "3"),
        (np.arange(3000), json.dumps(list(range(3000)))),
    ],
)
def test_values_without_a_json_type_are_converted(value, text):
    assert to_json(value) == text


def test_unsupported_type_is_refused():
    with pytest.raises(TypeError, match="a object has no JSON form"):
        to_json({"a": object()})


@pytest.mark.parametrize(
    "text", ["NaN", '{"a": Infinity}', "[-Infinity]", b"[NaN]", "[1e999]", "-1e999", "-0.001e-400"]
)
def test_python_only_json_is_refused(text):
    with pytest.raises(ValueError, match=r"is not JSON|is too (large|small) for a 64-bit float"):
        from_json(text)


@pytest.mark.parametrize("text", ["0", "-0.0", "0e5", "0.000E-400", "5e-324", "1.7e308"])
def test_number_that_fits_a_float_is_accepted(text):
    assert from_json(text) == float(text)


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, -1e9])
def test_very_small_logprob_becomes_minus_9999(logprob):
    assert logprob_number(logprob) == -9999.0
    assert logprob_number(-0.25) == -0.25


def float_options():
    """Yield each float option of each configuration class."""
    classes = [GenerateConfig, ServeConfig, EvaluateConfig, BenchConfig, TuneConfig, TrainConfig, PlanConfig, KeyRecord]
    for config_class in classes:
        for name, field in config_class.model_fields.items():
            if field.annotation in (float, float | None):
                yield pytest.param(config_class, name, id=f"{config_class.__name__}.{name}")


@pytest.mark.parametrize(("config_class", "name"), [*float_options()])
@pytest.mark.parametrize("number", [*NON_FINITE, "nan", "inf"])
def test_configurations_refuse_non_finite_numbers(config_class, name, number):
    with pytest.raises(pydantic.ValidationError) as exception:
        config_class(**{name: number})
    assert any(error["loc"] == (name,) for error in exception.value.errors()), name


@pytest.mark.parametrize(
    "text", [r'"\ud83d"', r'{"\uDC00": 1}', '"\ud83d"', b'"\xed\xa0\x80"', '"x"'.encode("utf-16-le")]
)
def test_lone_surrogates_are_refused(text):
    with pytest.raises(ValueError, match=r"half a surrogate|codec|Expecting|control"):
        from_json(text)


@pytest.mark.parametrize(
    "text", [r'"\ud83d\ude00"', '"\U0001f600"', '"\U0001f600"'.encode(), b'\xef\xbb\xbf"\xf0\x9f\x98\x80"']
)
def test_surrogate_pair_is_a_character(text):
    assert from_json(text) == "\U0001f600"
