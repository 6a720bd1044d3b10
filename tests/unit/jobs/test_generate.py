import pytest

from jobs import cli


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("s3://nowhere/run", "create the bucket"),
        ("s3://bucket", "must be a local folder or s3://BUCKET/FOLDER, not 's3://bucket'"),
        ("gs://bucket/run", "must be a local folder or s3://BUCKET/FOLDER, not 'gs://bucket/run'"),
    ],
)
def test_invalid_output_is_refused_before_reading_the_corpus(s3, capsys, output, message):
    assert cli.run(["generate", "--engine", "fake", "--input", "none.jsonl", "--output", output]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "none.jsonl" not in error
