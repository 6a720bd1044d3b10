"""The current budgets of tags and of the endpoint."""

from pathlib import Path

from peagle.economics.shared_budgets import BUDGETS_NAME, ENDPOINT_ACCOUNT, SharedBudget, read_budgets, tag_accounts
from pipelines.online.gateway.keys import KeyRecord
from pipelines.online.gateway.watched import WatchedFile

Payer = KeyRecord | SharedBudget
"""Anything with an account and a budget."""


class SharedBudgets:
    """The budgets of a ledger, reloaded when they change.

    All methods raise ConfigError if the file could never be read.
    """

    def __init__(self, ledger: Path) -> None:
        self._file = WatchedFile(ledger / BUDGETS_NAME, read_budgets)

    def all(self) -> tuple[SharedBudget, ...]:
        return self._file.now()

    def of_tags(self, tags: str) -> list[SharedBudget]:
        """Return the budgets that apply to these tags, which are in the form of a ledger record."""
        accounts = tag_accounts(tags)
        return [budget for budget in self._file.now() if budget.account in accounts]

    def of_endpoint(self) -> list[SharedBudget]:
        """Return the endpoint's budget, if there is one."""
        return [budget for budget in self._file.now() if budget.account == ENDPOINT_ACCOUNT]
