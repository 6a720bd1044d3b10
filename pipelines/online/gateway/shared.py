"""Budgets of tags and of the endpoint, as they are at the moment."""

from pathlib import Path

from peagle.economics.shared_budgets import BUDGETS_NAME, ENDPOINT_ACCOUNT, SharedBudget, read_budgets, tag_accounts
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.gateway.watched import WatchedFile

Payer = KeyRecord | SharedBudget
"""Anything with an account and a budget."""


class SharedBudgets:
    """The budgets of a ledger; a change counts within a second.

    Each method raises ConfigError where they cannot be read, and never could be.
    """

    def __init__(self, ledger: Path) -> None:
        self._file = WatchedFile(ledger / BUDGETS_NAME, read_budgets)

    def all(self) -> tuple[SharedBudget, ...]:
        """Those of tags, and the endpoint's."""
        return self._file.now()

    def of_tags(self, tags: str) -> list[SharedBudget]:
        """Those that pay for whatever has these tags, in the form of a record."""
        accounts = tag_accounts(tags)
        return [budget for budget in self._file.now() if budget.account in accounts]

    def of_endpoint(self) -> list[SharedBudget]:
        """The endpoint's, if it has one."""
        return [budget for budget in self._file.now() if budget.account == ENDPOINT_ACCOUNT]
