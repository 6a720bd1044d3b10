import traceback

from peagle.errors import CapacityError, EngineError
from pipelines.cluster.failures import to_peagle_error

ADVICE = "Failed to process map task after 1/1 attempts (total backoff 0.0s).\nTo change retry attempts, configure it."


class RayTaskError(Exception):
    cause: BaseException | None = None


def test_peagle_error_is_found_in_the_cause_chain():
    outer = RayTaskError("boom")
    outer.cause = CapacityError("too big", hint="smaller")
    assert to_peagle_error(outer, "it failed", hint="see logs/") is outer.cause


def test_peagle_error_is_parsed_from_a_traceback():
    printed = "".join(traceback.format_exception(CapacityError("too big: 3 GiB", hint="use --max-model-len 2048")))
    text = f"ray::Worker.generate()\n{printed}\nThe above exception was the direct cause of the following one:\n..."
    result = to_peagle_error(RayTaskError(text), "it failed", hint="see logs/")
    assert isinstance(result, CapacityError)
    assert (result.message, result.hint) == ("too big: 3 GiB", "use --max-model-len 2048")


def test_message_of_another_error_is_its_last_line():
    result = to_peagle_error(
        RayTaskError("Traceback\nOSError: disk full"), "it failed", hint="see logs/", otherwise=EngineError
    )
    assert isinstance(result, EngineError)
    assert result.message.endswith("OSError: disk full")


def test_ray_data_wrapper_is_removed():
    wrapped = "UserCodeException: UDF failed to process a data block.\n" + ADVICE
    chained = "The above exception was the direct cause of the following exception:"
    text = f"Traceback\nOSError: disk full\n\n{chained}\n{wrapped}"
    assert to_peagle_error(RayTaskError(text), "it failed", hint="see logs/").message == "it failed: OSError: disk full"


def test_retry_advice_of_ray_data_is_removed():
    from ray.data._internal.util import _annotate_exception_with_retry_context

    error = _annotate_exception_with_retry_context(
        OSError("disk full"),
        description="process map task",
        attempts=1,
        max_attempts=1,
        total_backoff_s=0.0,
        exception_str="disk full",
    )
    message = f"{error}\n" + "\n".join(getattr(error, "__notes__", ()))
    assert "disk full" in message
    assert to_peagle_error(RayTaskError(message), "it failed", hint="see logs/").message == "it failed: disk full"
