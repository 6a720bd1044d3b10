"""Errors of an object store: which are transient, and hints for the others."""

from botocore import exceptions
from botocore.parsers import ResponseParserError

from peagle.errors import StorageError

ERRORS = (exceptions.BotoCoreError, exceptions.ClientError, ResponseParserError)
_PASSING_STATUS = {408, 429, 500, 502, 503, 504}
_PASSING_CODES = {
    "ConditionalRequestConflict",  # two conditional writes of one key at the same moment
    "InternalError",
    "OperationAborted",
    "PreconditionFailed",  # a key existed, but was deleted before its writer could be read
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
}
_PASSING = (
    exceptions.HTTPClientError,
    exceptions.ConnectionError,
    exceptions.IncompleteReadError,
    exceptions.CredentialRetrievalError,
    ResponseParserError,
)
_WHO = "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, here and on every node"
_WHERE = "check AWS_ENDPOINT_URL and AWS_REGION, here and on every node"
_RIGHTS = "allow s3:GetObject, PutObject, DeleteObject, AbortMultipartUpload and ListBucket there"
_HINTS = {
    "NoSuchBucket": f"create the bucket, or name another one; {_WHERE}",
    "InvalidBucketName": "use a valid bucket name",
    "AccessDenied": f"{_RIGHTS}; {_WHO}",
    "AllAccessDisabled": f"{_RIGHTS}; {_WHO}",
    "403": f"{_RIGHTS}; {_WHO}",
    "InvalidAccessKeyId": _WHO,
    "SignatureDoesNotMatch": _WHO,
    "InvalidToken": _WHO,
    "ExpiredToken": f"the credentials have expired; {_WHO}",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "PermanentRedirect": _WHERE,
    "AuthorizationHeaderMalformed": _WHERE,
    "QuotaExceeded": "free space in the bucket",
    "EntityTooLarge": "use smaller units in a new run: --rows-per-unit",
}


def code_of(error: Exception) -> str:
    """Return the error code of S3; empty if the store did not respond."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, exceptions.ClientError) else ""


def status_of(error: Exception) -> int:
    """Return the HTTP status; 0 if the store did not respond."""
    if not isinstance(error, exceptions.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_missing(error: Exception) -> bool:
    """Whether the object does not exist. A missing bucket is another error, except for a HEAD request."""
    return code_of(error) in ("NoSuchKey", "404")


def passes(error: Exception) -> bool:
    """Whether the error is transient."""
    if isinstance(error, exceptions.SSLError):
        return False
    return isinstance(error, _PASSING) or status_of(error) in _PASSING_STATUS or code_of(error) in _PASSING_CODES


def refused(what: str, error: Exception) -> StorageError:
    """Return the exception for a permanent error."""
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return StorageError(f"{what}: there are no credentials ({error})", hint=_WHO)
    return StorageError(f"{what}: {error}", hint=_HINTS.get(code_of(error), f"{_WHERE}; {_WHO}"))


def unavailable(what: str, error: Exception, seconds: float, num_requests: int) -> StorageError:
    """Return the exception for a transient error that lasted too long."""
    return StorageError(
        f"{what}: failed for {seconds:.0f} s and {num_requests} requests; the last error: {error}",
        hint=f"make sure that the store is reachable, then repeat the command: committed units are safe; {_WHERE}",
    )
