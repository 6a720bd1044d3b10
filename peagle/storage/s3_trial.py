"""Whether a store can hold a run, tried before anything is done in it.

It knows the one promise that cannot do without the store: a name that is taken stays taken.
"""

import uuid

from peagle.errors import StorageError
from peagle.storage import s3_client, s3_errors
from peagle.storage.s3_client import Address, ObjectStore

_TRIALS = 3


def require_conditional_writes(folder: Address) -> None:
    """Make sure that the store can be written, and refuses to write a name twice when it is asked to.

    Raises:
        StorageError: it cannot, or the variables do not name a store that can be used.
    """
    hasty = ObjectStore(patience_s=s3_client.SHORT_PATIENCE_S)
    try:
        # Another driver may clear a trial's object under way, and the second PUT then finds its name free.
        held = any(_is_held(hasty, folder) for _ in range(_TRIALS))
    except StorageError as error:
        if s3_errors.code_of(error.__cause__) != "NotImplemented":  # type: ignore[arg-type]
            raise
        held = False
    if not held:
        raise StorageError(
            f"{folder}: this store has no conditional writes (PUT with If-None-Match: *), so two engines could both"
            " commit a unit",
            hint="write to a store that has them, or to a local disk, and copy the run when it ends",
        )


def _is_held(store: ObjectStore, folder: Address) -> bool:
    at = Address(folder.bucket, f"{folder.key}/0.{uuid.uuid4().hex}.json")
    is_held = store.write_once(at, b"{}") and not store.write_once(at, b"{}")
    store.delete(at)
    return is_held
