import json

from jobs import cli


def test_quantize_and_dequantize(tmp_path, shipped_head, capsys):
    result = tmp_path / "result.json"
    fp8, dequantized = str(tmp_path / "fp8"), str(tmp_path / "dequantized")
    assert cli.run(["quantize-drafter", str(shipped_head), "--output", fp8, "--json", str(result)]) == 0
    printed = capsys.readouterr().out
    written = json.loads(result.read_text())
    assert f"{written['num_bytes_after']:,} bytes, {written['num_bytes_before']:,} before" in printed
    assert all(weight["name"] in printed for weight in written["weights"])
    assert 0.5 < written["num_bytes_after"] / written["num_bytes_before"] < 0.51
    assert cli.run(["quantize-drafter", fp8, "--output", dequantized, "--dequantize"]) == 0
    assert (tmp_path / "dequantized" / "model.safetensors").stat().st_size == written["num_bytes_before"]


def test_invalid_arguments_are_refused(tmp_path, shipped_head, capsys):
    output = str(tmp_path / "out")
    assert cli.run(["quantize-drafter", str(tmp_path), "--output", output]) == 2
    assert "peagle quantize-drafter: " in capsys.readouterr().err
    assert cli.run(["quantize-drafter", str(shipped_head), "--output", output, "--dequantize", "--keep", "fc"]) == 2
    assert "--keep" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
