"""Upload folders to the test's S3 server."""

from pathlib import Path

from peagle.storage import storage_path, write_atomic


def upload(folder: Path, name: str, **replaced: bytes) -> None:
    """Upload a folder's files to the bucket under `name`. `replaced` has other contents for some files."""
    for file in folder.iterdir():
        write_atomic(storage_path(f"s3://bucket/{name}") / file.name, replaced.get(file.name, file.read_bytes()))
