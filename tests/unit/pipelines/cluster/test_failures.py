import traceback

from peagle.errors import CapacityError, EngineError
from pipelines.cluster.failures import explain

ADVICE = "Failed to process map task after 1/1 attempts (total backoff 0.0s).\nTo change retry attempts, configure it."


class RayTaskError(Exception):
    cause: BaseException | None = None


def test_our_own_error_is_found_below_rays():
    outer = RayTaskError("boom")
    outer.cause = CapacityError("too big", hint="smaller")
    assert explain(outer, "it broke off", hint="see logs/") is outer.cause


def test_our_own_error_is_found_in_the_text_of_a_traceback():
    text = "Traceback ...\npeagle.errors.EngineError: the vLLM engine process died\n\nThe above exception ..."
    found = explain(RayTaskError(text), "it broke off", hint="see logs/")
    assert isinstance(found, EngineError)
    assert found.message == "the vLLM engine process died"
    assert "logs/" in found.hint


def test_the_advice_in_the_text_of_a_traceback_is_kept():
    printed = "".join(traceback.format_exception(CapacityError("too big: 3 GiB", hint="use --max-model-len 2048")))
    text = f"ray::Worker.generate()\n{printed}\nThe above exception was the direct cause of the following one:\n..."
    found = explain(RayTaskError(text), "it broke off", hint="see logs/")
    assert isinstance(found, CapacityError)
    assert (found.message, found.hint) == ("too big: 3 GiB", "use --max-model-len 2048")


def test_another_error_keeps_its_last_line():
    found = explain(
        RayTaskError("Traceback\nOSError: disk full"), "it broke off", hint="see logs/", otherwise=EngineError
    )
    assert isinstance(found, EngineError)
    assert found.message.endswith("OSError: disk full")


def test_rays_advice_on_its_retries_is_left_out():
    advice = (
        "Failed to process map task after 1/1 attempts (total backoff 0.0s).\nTo change retry attempts, configure it."
    )
    found = explain(RayTaskError(f"Traceback\nOSError: disk full\n{advice}"), "it broke off", hint="see logs/")
    assert found.message == "it broke off: OSError: disk full"


def test_what_ray_data_says_of_every_failed_block_is_not_the_cause():
    wrapped = "UserCodeException: UDF failed to process a data block.\n" + ADVICE
    chained = "The above exception was the direct cause of the following exception:"
    text = f"Traceback\nOSError: disk full\n\n{chained}\n{wrapped}"
    assert explain(RayTaskError(text), "it broke off", hint="see logs/").message == "it broke off: OSError: disk full"


def test_the_advice_is_in_the_words_of_ray_data():
    from ray.data._internal.util import _annotate_exception_with_retry_context

    error = _annotate_exception_with_retry_context(
        OSError("disk full"),
        description="process map task",
        attempts=1,
        max_attempts=1,
        total_backoff_s=0.0,
        exception_str="disk full",
    )
    said = f"{error}\n" + "\n".join(getattr(error, "__notes__", ()))
    assert "disk full" in said
    assert explain(RayTaskError(said), "it broke off", hint="see logs/").message == "it broke off: disk full"
