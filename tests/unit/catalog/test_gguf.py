from peagle.catalog.gguf import _clean_config, _clean_tokenizer


def test_config_has_the_upstream_values():
    raw = {
        "_model_name_or_path": "Smollm2 135M 8k Lc100K Mix1 Ep2",
        "rms_norm_eps": 9.999999747378752e-06,
        "vocab_size": 49152,
    }
    assert _clean_config(raw, "org/model") == {
        "_name_or_path": "org/model",
        "rms_norm_eps": 1e-05,
        "vocab_size": 49152,
    }


def test_tokenizer_config_is_cleaned():
    raw = {"is_local": True, "local_files_only": False, "model_max_length": 10**30, "pad_token": "<p>"}
    assert _clean_tokenizer(raw, 8192) == {"model_max_length": 8192, "pad_token": "<p>"}
